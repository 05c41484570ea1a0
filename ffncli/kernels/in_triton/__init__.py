"""Kernels in Triton, and what they share: `functions` and `launched`, which import triton; only `build` imports them."""
