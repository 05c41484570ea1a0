"""Read config.json files: each model family has a row that defines the meaning of its fields."""
