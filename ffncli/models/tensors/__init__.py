"""Recognise FFNs by the names and shapes of their tensors, locate each weight, and read it."""
