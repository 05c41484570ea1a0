"""What honest timing needs on a GPU: the GPU's own clock, and the capture of calls as CUDA graphs."""
