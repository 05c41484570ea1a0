"""`ffn verify`: its options, its command, its pages."""
