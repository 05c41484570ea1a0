"""Modules that only workers load: how kernels are placed in memory, called in rounds, checked and timed."""
