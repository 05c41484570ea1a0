"""HOW FAST a block runs: ratios of kernels with reliable intervals, verified against float64 before they are timed."""
