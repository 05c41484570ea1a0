"""Options and lines that several commands share."""
