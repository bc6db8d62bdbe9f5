"""Chunks of a few bytes, so that small models have many, on both sides alike."""

from typing import Any

import pytest


def cut_into(least: int, most: int, *, autouse: bool = True) -> Any:  # noqa: ANN401
    """A fixture of pytest: in tests of its module chunks have so many bytes."""

    @pytest.fixture(autouse=autouse)
    def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MIN", least)
        monkeypatch.setattr("pswire.placement.CHUNK_BYTES_MAX", most)

    return small_chunks
