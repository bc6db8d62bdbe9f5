"""Who is refused sees the line of their script; who met a bug sees everything."""

import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from psworker.errors import ConfigurationError, ProtocolError, PsError
from psworker.refusals import at_entrance

INSIDE = """
def _deep(error):
    if error:
        _deeper(error)

def _deeper(error):
    try:
        raise KeyError("what our code met")
    except KeyError:
        raise error
"""
_scope: dict[str, Any] = {"__name__": "psworker.inside"}
exec(compile(INSIDE, "inside.py", "exec"), _scope)
_deep: Callable[[BaseException], None] = _scope["_deep"]
call = at_entrance(_deep)


def _names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize(
    "error", [ConfigurationError("give another"), KeyboardInterrupt()]
)
def test_a_refusal_or_ctrl_c_ends_at_the_entrance(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(type(error)) as caught:
        call(error)
    assert not _names(caught.value)[1:]
    text = "".join(traceback.format_exception(caught.value))
    assert "what our code met" not in text
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.exc_text is not None
    assert "in _deeper" in record.exc_text


def test_what_a_refusal_names_as_its_cause_is_shown() -> None:
    @at_entrance
    def caused() -> None:
        raise ConfigurationError("no such file") from OSError("not there")

    with pytest.raises(ConfigurationError) as caught:
        caused()
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    "error", [RuntimeError("a bug"), ProtocolError("a bug"), PsError("of any kind")]
)
def test_what_may_be_a_bug_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        call(error)
    assert _names(caught.value)[1:] == ["entrance", "_deep", "_deeper"]
    assert isinstance(caught.value.__context__, KeyError)
    assert not caught.value.__suppress_context__
