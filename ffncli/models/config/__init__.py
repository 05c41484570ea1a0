"""Read config.json files: each model family has a row that says what its fields mean."""
