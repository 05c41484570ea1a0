"""How one number of a trace came about."""
