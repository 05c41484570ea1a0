"""Rows, the journal of an unfinished run, the CSV. No torch."""
