"""HOW users ask: each command parses, makes one core call, and shows the record."""
