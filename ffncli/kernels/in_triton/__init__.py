"""Kernels in Triton, and what they share. `functions` and `launched` import triton, and only a kernel's `build` imports
these two.
"""
