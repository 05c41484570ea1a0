"""Kernels whose outputs are right and whose backward passes are wrong, each after a public report or a plausible slip.

The comment above a kernel names the first tensor whose gradient is wrong, in the order in which a backward pass
computes the gradients, or the check that refuses it. `honest.py` has kernels that must not be accused. All are loaded
by the kernel's host process, never by the tests.
"""
