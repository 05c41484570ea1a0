"""How one number of a trace was computed."""
