"""Proofs that ways of computing a block agree."""
