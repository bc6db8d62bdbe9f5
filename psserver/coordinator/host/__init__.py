"""Carries out what the coordinator's core decides, on one event loop."""
