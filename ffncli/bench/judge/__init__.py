"""Turn measured times into intervals, ratios, verdicts, warnings and gates. Needs no torch."""
