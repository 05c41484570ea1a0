"""Use kernels in a user's own program: as a function of x, or in place of the FFNs of a loaded transformers model."""
