"""Statistics, distances, rounding and tolerances of tensors, independent of any block."""
