"""Activation functions: their values, their rounding errors and their effect on a model's own data."""
