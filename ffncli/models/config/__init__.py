"""A config.json read: a row per model family says which fields hold what."""
