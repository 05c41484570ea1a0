"""Options and lines of output that several commands share."""
