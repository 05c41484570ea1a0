"""The machine's description: for rows, comparisons and advice."""
