"""The experts of a mixture over a corpus: how they are used, and what each is worth."""
