"""HOW a block runs in torch: the reference implementation of the steps, and everything built on it."""
