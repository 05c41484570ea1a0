"""The tests of ffn, a folder for each floor."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the repository
