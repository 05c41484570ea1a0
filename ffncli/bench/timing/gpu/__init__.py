"""What a GPU needs for honest timing: its clock, and the capture of calls as CUDA graphs."""
