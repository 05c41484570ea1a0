"""`--kernel auto`: the fastest kernel of a case on this machine, timed once and kept."""
