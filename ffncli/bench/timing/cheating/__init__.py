"""Detection of kernels that cheat: by what they replace in this process, and by how they answer further calls."""
