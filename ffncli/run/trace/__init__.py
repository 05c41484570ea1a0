"""Traces: a block run step by step, with a record of every intermediate. A question is answered with a session."""
