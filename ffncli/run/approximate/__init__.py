"""Blocks of growing width fitted to a function."""
