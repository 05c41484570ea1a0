"""Plots: their definition, and drawing them as text in Braille or as a picture in a file."""
