"""A real model loaded by transformers, run on a prompt, and listened to."""
