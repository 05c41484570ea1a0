"""Activations on a model's own data, and their rounding."""
