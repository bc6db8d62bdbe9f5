"""What tests expect of refusals."""

import pytest

from pswire.reasons import ErrorReason, Refusal


def refused(
    reason: ErrorReason, match: str | None = None
) -> "pytest.RaisesExc[Refusal]":
    """Expects a refusal for a reason, with a text that the pattern matches."""

    def check(refusal: Refusal) -> bool:
        assert refusal.reason is reason, refusal
        return True

    return pytest.raises(Refusal, match=match, check=check)
