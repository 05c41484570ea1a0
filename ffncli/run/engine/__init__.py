"""Executing steps on tensors: weights, inputs, the reference implementation, threads."""
