"""Reading a config.json: a row per model family says which fields hold what."""
