"""Numbers about tensors: statistics, distances, rounding, tolerances. Knows no block."""
