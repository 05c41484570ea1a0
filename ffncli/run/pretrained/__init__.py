"""Real models, loaded by transformers and run on a prompt, with hooks on their FFNs."""
