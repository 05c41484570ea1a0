"""`ffn plan`: its options, its command, its pages."""
