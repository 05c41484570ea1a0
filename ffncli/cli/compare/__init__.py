"""`ffn compare`: its options, its command, its pages."""
