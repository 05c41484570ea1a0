"""Explaining how one value of a trace was computed."""
