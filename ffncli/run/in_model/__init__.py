"""Kernels inside a user's own program: as a function of x, and in place of a loaded transformers model's FFNs."""
