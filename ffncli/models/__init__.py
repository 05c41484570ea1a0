"""Where a block comes from: the catalog, a config.json or a checkpoint. Counting works without torch."""
