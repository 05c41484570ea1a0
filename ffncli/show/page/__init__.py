"""HTML pages in a single file: elements, charts, heat maps, and the scripts that update them; knows nothing of FFNs."""
