"""Kernels of other packages, found when they are needed: skipped with the reason where a package is not installed."""
