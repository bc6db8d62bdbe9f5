"""Chunks of a few bytes, so that small models have many, on both sides alike."""

import pytest


def cut_into(monkeypatch: pytest.MonkeyPatch, least: int, most: int) -> None:
    """Until the end of the test chunks have between `least` and `most` bytes."""
    monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MIN", least)
    monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MAX", most)
