"""Blocks split over ranks: joining a process group, the split module, its collectives."""
