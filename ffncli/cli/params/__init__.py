"""`ffn params`: its options, its command, its pages."""
