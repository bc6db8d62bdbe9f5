"""Carries out what a shard's core decides: arithmetic, memory, calls."""
