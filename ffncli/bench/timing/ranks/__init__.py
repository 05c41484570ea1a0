"""A case whose block is split over ranks: every rank measures it in step with the others."""
