"""The public suite: frozen cases that anyone can enter a kernel in, and what admits a result."""
