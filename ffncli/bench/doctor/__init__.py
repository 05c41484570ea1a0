"""Checks of what this machine can do, and how small a difference it can measure."""
