"""HOW FAST a block runs: time ratios between kernels with reliable intervals; each kernel is verified against float64
before it is timed."""
