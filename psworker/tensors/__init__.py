"""Tensors as chunks, and what encodes them."""
