"""Plots: what one is, drawn as text in Braille or as a picture in a file."""
