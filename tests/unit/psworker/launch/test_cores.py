"""How processes of one machine share its cores, and that this is said."""

import pytest

from psworker.launch import cores


@pytest.mark.parametrize(
    ("core_count", "process_count", "share"),
    [(8, 2, 4), (8, 3, 2), (2, 2, 1), (2, 9, 1), (1, 1, 1)],
)
def test_each_has_its_share_and_at_least_one(
    monkeypatch: pytest.MonkeyPatch, core_count: int, process_count: int, share: int
) -> None:
    monkeypatch.setattr(cores, "usable_core_count", lambda: core_count)
    assert cores.core_share(process_count) == share


def test_the_share_is_said_unless_the_user_has_chosen_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cores, "usable_core_count", lambda: 8)
    text = cores.sharing_text(3, 2, {})
    assert text.startswith("3 processes share 8 cores, each with OMP_NUM_THREADS=2;")
    assert cores.sharing_text(3, 2, {"OMP_NUM_THREADS": "8"}) == ""
