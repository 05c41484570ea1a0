"""What the kernels in Triton share. `functions` and `launched` import triton; only a kernel's `build` imports these."""
