"""The public suite: frozen cases for which anyone can submit a kernel, and the conditions that admit a result."""
