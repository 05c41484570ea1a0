"""Kernels in Triton, and the functions they share. `functions` and `launched` import triton; they are imported only
inside a kernel's `build`."""
