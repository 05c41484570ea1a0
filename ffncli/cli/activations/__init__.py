"""`ffn activations`: its options, its command, its pages."""
