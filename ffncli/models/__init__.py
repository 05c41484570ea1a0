"""The sources of blocks: the catalog, config.json files and checkpoints. Counting works without torch."""
