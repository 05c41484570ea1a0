"""What a worker loads: placements, rounds, clocks, counters."""
