"""Proofs that different ways of computing a block agree."""
