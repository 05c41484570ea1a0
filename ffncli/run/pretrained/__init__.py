"""A real model, loaded by transformers and run on a prompt, with hooks on its FFNs."""
