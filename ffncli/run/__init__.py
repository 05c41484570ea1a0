"""HOW it runs in torch: the reference reader of the steps, and what is built on it."""
