"""HOW it is asked: each command parses, makes one core call, and shows the record."""
