"""Kernels that compute the experts of a mixture together."""
