"""Users' Python files: loading their modules and kernels, and identifying the block that a module computes."""
