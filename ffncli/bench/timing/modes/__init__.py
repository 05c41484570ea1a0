"""Ways to measure other than timing a case's kernels in rounds: by step, inside a model, for long, or by a race."""
