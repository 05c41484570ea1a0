"""What the files say about a model, compared with its config if there is one."""
