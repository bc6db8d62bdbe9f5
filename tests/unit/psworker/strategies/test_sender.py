"""Pushes beside the script: each is made once, wherever Ctrl-C comes."""

from psworker.strategies.sender import Sender
from tests.integration.interruptions import AtLine, Interrupted, Line, text_of


def _made(line: Line | None) -> tuple[int, AtLine]:
    """How often one push is made that is interrupted before a line of `send`."""
    sender, made = Sender(), list[int]()
    at = AtLine(line)
    try:
        with at:
            sender.send(lambda: made.append(1))
    except Interrupted:
        if not sender.is_open:
            sender.send(lambda: made.append(1))
    sender.finish()
    assert not sender.is_open
    sender.close()
    return len(made), at


def test_a_push_is_made_once_wherever_its_beginning_is_interrupted() -> None:
    lines = list(_made(None)[1].lines)

    assert len(lines) > 10
    for line in lines:
        count, at = _made(line)
        assert at.is_reached, text_of(line)
        assert count == 1, text_of(line)
