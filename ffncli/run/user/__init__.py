"""A user's Python files: modules, kernels, and what they compute."""
