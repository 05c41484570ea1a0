"""HOW users ask: each command parses its options, makes one core call, and shows the resulting record."""
