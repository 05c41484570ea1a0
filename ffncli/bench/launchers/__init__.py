"""Distribution of cases to slots on other machines, by SLURM or by Ray. Nothing here needs torch: the slots measure."""
