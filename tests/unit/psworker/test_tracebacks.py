"""A refusal or a Ctrl-C is shown with the lines of the script, and no others."""

import functools
import logging
import signal
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psworker import tracebacks
from psworker.errors import ConfigurationError, ProtocolError, PsError
from psworker.tracebacks import at_entrance

SCRIPT = ("train.py", "__main__")
OURS = ("/opt/site-packages/psworker/fake.py", "psworker.fake")
TORCH = ("/opt/site-packages/torch/fake.py", "torch.fake")
TRAINER = ("/opt/site-packages/trainer/fake.py", "trainer.fake")
STANDARD = (sysconfig.get_path("stdlib") + "/threading.py", "threading")
IMPORT = ("<frozen importlib._bootstrap>", "importlib._bootstrap")


FUNCTION = """
def {name}(rest):
    if isinstance(rest, BaseException):
        raise rest
    rest()
"""


def _function(place: tuple[str, str], name: str) -> Callable[[Any], None]:
    """A function of that file and module, which calls or raises what it is given."""
    filename, module = place
    scope: dict[str, Any] = {"__name__": module}
    exec(compile(FUNCTION.format(name=name), filename, "exec"), scope)
    function: Callable[[Any], None] = scope[name]
    return function


def _raised(*places: tuple[str, str], error: BaseException) -> BaseException:
    """`error` out of calls from place to place, of functions `f0`, `f1`, ..."""
    rest: Any = error
    for index, place in reversed(list(enumerate(places))):
        rest = functools.partial(_function(place, f"f{index}"), rest)
    with pytest.raises(type(error)) as caught:
        rest()
    met = caught.value.__traceback__
    assert met is not None
    return caught.value.with_traceback(met.tb_next)  # without the frame of this one


def _names(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def _shown(*places: tuple[str, str]) -> list[int]:
    """Numbers of the places that are left."""
    error = _raised(*places, error=KeyboardInterrupt())
    tracebacks.end_in_script(error)
    return [int(name[1:]) for name in _names(error)]


@pytest.mark.parametrize(
    ("places", "shown"),
    [
        pytest.param((SCRIPT, OURS), [0], id="a call"),
        pytest.param((SCRIPT, SCRIPT, OURS, OURS, STANDARD), [0, 1], id="a wait"),
        pytest.param((SCRIPT, TORCH, TORCH, OURS), [0], id="a hook of torch"),
        pytest.param((SCRIPT, IMPORT, IMPORT, OURS, TORCH), [0], id="an import"),
        pytest.param((SCRIPT, TRAINER, OURS), [0, 1], id="a trainer's call"),
        pytest.param((SCRIPT, OURS, TORCH, SCRIPT), [0, 3], id="a closure"),
        pytest.param((SCRIPT, OURS, SCRIPT, TORCH), [0, 2, 3], id="torch in a closure"),
        pytest.param((SCRIPT, OURS, SCRIPT, OURS), [0, 2], id="a call of a closure"),
        pytest.param((SCRIPT, TORCH, TORCH), [0, 1, 2], id="none of ours"),
        pytest.param((OURS, OURS), [], id="all ours"),
    ],
)
def test_frames_of_psworker_and_below_are_left_out(
    places: tuple[tuple[str, str], ...], shown: list[int]
) -> None:
    assert _shown(*places) == shown


def test_the_way_to_what_was_left_out_before_is_left_out() -> None:
    error: BaseException = KeyboardInterrupt()
    tracebacks.end_in_script(error)
    error = _raised(SCRIPT, TORCH, TORCH, error=error)
    tracebacks.end_in_script(error)
    assert _names(error) == ["f0"]


@pytest.mark.parametrize(
    ("place", "is_shown"), [(SCRIPT, True), (OURS, False), (STANDARD, False)]
)
def test_what_psworker_has_met_on_its_way_is_left_out(
    place: tuple[str, str], is_shown: bool
) -> None:
    error = KeyboardInterrupt()
    error.__context__ = _raised(place, error=KeyError("met"))
    tracebacks.end_in_script(error)
    assert ("met" in "".join(traceback.format_exception(error))) == is_shown


SCRIPT_TEXT = """
import sys, threading
sys.excepthook = lambda *a, show=sys.excepthook: (print("own hook"), show(*a))
from psworker.errors import ConfigurationError, ProtocolError

scope = {"__name__": "psworker.fake", "ConfigurationError": ConfigurationError,
         "ProtocolError": ProtocolError}
exec(compile("def deep(kind):\\n    raise kind('told')", "fake.py", "exec"), scope)
def go():
    scope["deep"]({kind})
{call}
"""


@pytest.mark.parametrize(
    "call", ["go()", "t = threading.Thread(target=go); t.start(); t.join()"]
)
@pytest.mark.parametrize(
    ("kind", "is_whole"),
    [
        ("ConfigurationError", False),
        ("KeyboardInterrupt", False),
        ("ProtocolError", True),
    ],
)
def test_uncaught_errors_are_shown_so(
    tmp_path: Path, call: str, kind: str, is_whole: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT_TEXT.replace("{kind}", kind).replace("{call}", call))
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    code = 0 if call != "go()" else -signal.SIGINT if kind == "KeyboardInterrupt" else 1
    assert ended.returncode == code, ended  # one that something killed says nothing
    assert "in go\n" in ended.stderr
    assert kind in ended.stderr.splitlines()[-1]
    assert ("in deep" in ended.stderr) == is_whole
    assert ("own hook" in ended.stdout) == (call == "go()")


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
_inside: dict[str, Any] = {"__name__": "psworker.inside"}
exec(compile(INSIDE, "inside.py", "exec"), _inside)
_deep: Callable[[BaseException], None] = _inside["_deep"]
call = at_entrance(_deep)


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
