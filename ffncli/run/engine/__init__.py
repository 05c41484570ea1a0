"""Steps executed on tensors: weights, inputs, the reference reader, threads."""
