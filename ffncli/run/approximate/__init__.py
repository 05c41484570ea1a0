"""Fit blocks of growing width to a function."""
