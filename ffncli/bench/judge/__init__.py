"""Intervals, ratios, verdicts, warnings, gates: from times to words. No torch."""
