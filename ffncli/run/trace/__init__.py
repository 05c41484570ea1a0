"""Traces: a block run step by step, with a record of every intermediate. Takes one question, returns one session."""
