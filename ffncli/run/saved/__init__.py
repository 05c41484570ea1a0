"""Traces in files, and comparisons of two of them."""
