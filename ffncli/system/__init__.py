"""THE MACHINE: its processors, memory and limits, and atomic file writes. Pure Python; knows nothing about FFNs."""
