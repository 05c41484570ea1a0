"""`ffn trace`: its options, its command, its pages."""
