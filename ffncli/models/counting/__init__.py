"""A model's parameters, FLOPs and bytes, and analyses based on them: sweeps, splits over ranks, equal-size blocks."""
