"""What the files say of a model, held against its config; or alone, where there is no config."""
