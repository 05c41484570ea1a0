"""What the machine is: for the rows, for comparing runs, for the advice."""
