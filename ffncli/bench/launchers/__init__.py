"""Cases dealt to slots on other machines, by SLURM or by Ray. No torch: what measures is in the slots."""
