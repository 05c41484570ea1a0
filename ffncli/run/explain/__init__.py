"""Explaining how one number of a trace was computed."""
