"""Two checkpoints compared: what was done to one to get the other."""
