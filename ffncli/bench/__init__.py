"""HOW FAST a block runs: time ratios with reliable intervals, between kernels that were first verified in float64."""
