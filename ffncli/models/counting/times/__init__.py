"""The times of kernels on accelerators: a formula, its fitted constants, and the measurements behind them."""
