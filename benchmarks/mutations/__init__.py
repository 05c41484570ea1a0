"""Breaks the code at drawn places and asks whether the tests notice: `python -m benchmarks.mutations --help`."""
