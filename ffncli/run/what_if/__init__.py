"""A block with a change: a weight of another value, or without a unit, an expert or its gate."""
