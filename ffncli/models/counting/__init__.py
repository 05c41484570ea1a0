"""Parameters, FLOPs and bytes of a model, and what follows from them: sweeps, shards, equal budgets."""
