"""Kernels that compute in fewer bits than their inputs have, and declare it."""
