"""HOW an option is declared: once, as a field of the record of options that contains it."""
