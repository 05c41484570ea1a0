"""A block in the form that another program loads."""
