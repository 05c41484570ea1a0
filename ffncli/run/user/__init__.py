"""A user's own Python: modules, kernels, and what they compute."""
