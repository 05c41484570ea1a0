"""A block run step by step: the record of every intermediate, one question in and one session out."""
