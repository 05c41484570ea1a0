"""The description of the machine, for rows, comparisons and advice."""
