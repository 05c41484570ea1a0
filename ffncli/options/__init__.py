"""HOW an option is declared: once, as a field of the record that asks for it."""
