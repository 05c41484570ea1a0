"""Traces in files, and two of them compared."""
