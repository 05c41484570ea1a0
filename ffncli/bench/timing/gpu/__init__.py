"""What honest timing needs on a GPU: a clock of the GPU's own, and the capture of calls as CUDA graphs."""
