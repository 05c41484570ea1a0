"""`ffn bench`: its options, its command, its pages."""
