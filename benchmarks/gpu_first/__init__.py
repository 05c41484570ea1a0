"""The first questions to a GPU: which hypotheses of the CUDA half hold, each answered by one short probe."""
