"""HTML pages in a single file: elements, charts, heat maps and a script that updates them; knows nothing of FFNs."""
