"""Evidence from a model's files, compared with its config if there is one."""
