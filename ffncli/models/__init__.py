"""WHERE a block comes from: catalog, config.json, checkpoints. Everything here that only counts works without torch."""
