"""Exporting a block to the formats of other programs."""
