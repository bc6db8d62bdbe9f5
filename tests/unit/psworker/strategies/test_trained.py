"""What a worker has trained beside its push is kept, whatever fails as it is taken."""

import pytest
import torch

from psworker.strategies.anchors import Fragment


def _fragment() -> Fragment:
    """Pushed at 1, trained to 3 since; the job has 10 by now."""
    fragment = Fragment([torch.tensor([10.0])], [torch.tensor([1.0])])
    fragment.keep_sent()
    fragment.local[0].fill_(3.0)
    return fragment


def _take(fragment: Fragment, *, ends_at: str = "") -> None:
    with fragment.with_trained():
        if ends_at == "begin":
            raise KeyboardInterrupt
        fragment.local[0].copy_(fragment.anchor[0])
        if ends_at == "end":
            raise KeyboardInterrupt


def test_what_was_trained_is_added_once_to_what_is_taken() -> None:
    fragment = _fragment()
    for expected in (12.0, 12.0):  # Ctrl-C came after it
        _take(fragment)
        assert fragment.local[0].item() == expected
    fragment.forget_sent()
    _take(fragment)
    assert fragment.local[0].item() == 10.0


@pytest.mark.parametrize("ends_at", ["begin", "end"])
def test_what_could_not_be_taken_is_taken_again_with_all_of_it(ends_at: str) -> None:
    """Also what local steps have changed between the two."""
    fragment = _fragment()
    with pytest.raises(KeyboardInterrupt):
        _take(fragment, ends_at=ends_at)
    assert fragment.local[0].item() == 3.0
    fragment.local[0] += 0.5
    _take(fragment)
    assert fragment.local[0].item() == 12.5
