"""HOW FAST a block runs: ratios of kernels with intervals that hold, verified against float64 before they are timed."""
