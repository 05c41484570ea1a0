"""The modules that only workers load: placements, rounds, clocks, counters."""
