"""Other ways to measure than timing a case's kernels in turn: step by step, inside a model, for long, or by a race."""
