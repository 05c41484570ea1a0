"""Ways to measure other than the kernels of a case in turn: step by step, inside a model, for long, by a race."""
