"""FFNs recognised by the names and shapes of their tensors, where each weight lies, and how to read it."""
