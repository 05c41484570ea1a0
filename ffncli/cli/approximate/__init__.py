"""`ffn approximate`: its options, its command, its pages."""
