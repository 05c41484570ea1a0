"""Result rows, their CSV, the journal of an unfinished run, and merging. Needs no torch."""
