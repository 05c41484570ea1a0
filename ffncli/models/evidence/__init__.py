"""What a model's files show, compared with its config if there is one."""
