"""Checks of what this machine can do, and of how small a difference it can measure."""
