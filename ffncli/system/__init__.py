"""THE MACHINE below us: its processors, memory and limits, and files written whole. Pure Python; knows no FFN."""
