"""Tests of ffncli/options."""
