"""The machine's description: for the rows, for comparing runs, for the advice."""
