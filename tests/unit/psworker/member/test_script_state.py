"""What a script has registered: as of which step it is sent, and what is loaded."""

import asyncio
import logging
import random
from typing import Any

import pytest
import torch

from pswire.checkpoint.registered_state import (
    NotStorableError,
    decode_states,
    encode_states,
)
from psworker.errors import ConfigurationError, SnapshotError
from psworker.member import script_state
from psworker.member.membership import Membership
from psworker.member.script_state import ScriptState, StateCopies
from psworker.transport.values import StateWanted, WorkerView
from tests.doubles.core_values import key, record

LOADER = "loader"


class Counter:
    """What a script counts."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def made(worker_id: str = "a", *, makes_checkpoints: bool = True) -> ScriptState:
    """Of a worker that is a member, beside one that is longer in the job than it."""
    membership = Membership(key(worker_id))
    members = {"a": 0, "b": 4}
    membership.take(
        WorkerView(record(members), (), makes_checkpoints=makes_checkpoints)
    )
    state = ScriptState(membership)
    state.joined(LOADER)
    return state


# Which copy a cut gets


def test_a_cut_gets_the_state_as_of_its_push_and_no_later_one() -> None:
    copies = StateCopies()
    copies.keep(0, b"0")
    for sequence in (1, 2, 3):
        copies.step(sequence)
        assert copies.after(sequence, 0) is None, "the script has not gone on"
        assert copies.lacks(0)
        copies.keep(0, b"%d" % sequence)
        assert not copies.lacks(0)
    assert [copies.after(sequence, 0) for sequence in range(4)] == [
        b"0",
        b"1",
        b"2",
        b"3",
    ]


def test_a_push_that_the_script_has_not_made_changes_nothing() -> None:
    """Of weight 0, for a worker that waits for data or whose values were published."""
    copies = StateCopies()
    copies.step(1)
    copies.keep(0, b"1")
    assert copies.after(3, 0) == b"1"
    copies.step(4)
    assert copies.after(3, 0) == b"1"
    assert copies.after(4, 0) is None


def test_of_an_epoch_that_was_over_the_end_is_in_the_state() -> None:
    copies = StateCopies()
    copies.step(6)
    copies.keep(0, b"last batch")
    assert copies.after(6, 0) == b"last batch", "others have data of it yet"
    assert copies.after(6, 1) is None, "the script may still evaluate"
    copies.keep(1, b"epoch ended")
    assert copies.after(6, 1) == b"epoch ended"
    assert copies.after(6, 0) == b"last batch"


def test_a_script_that_goes_on_otherwise_gives_what_there_is() -> None:
    copies = StateCopies()
    copies.step(6)
    copies.keep(0, b"last batch")
    copies.step(7)  # without a batch of the next epoch
    assert copies.after(6, 1) == b"last batch"
    copies.end()
    assert copies.after(7, 1) == b"", "it is done, and nothing was kept"


def test_the_oldest_go_and_the_newest_two_steps_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script_state, "STEP_COUNT_MAX", 3)
    copies = StateCopies()
    for sequence in range(1, 6):
        copies.step(sequence)
        copies.keep(0, b"x")
    assert [copies.after(sequence, 0) for sequence in range(6)] == [
        b"",
        b"",
        b"",
        b"x",
        b"x",
        b"x",
    ]
    monkeypatch.setattr(script_state, "BYTE_COUNT_MAX", 1)
    copies.step(6)
    copies.keep(0, b"x")
    assert [copies.after(sequence, 0) for sequence in (4, 5, 6)] == [b"", b"x", b"x"]


@pytest.mark.parametrize("seed", range(200))
def test_drawn_scripts_get_what_they_had_when_they_went_on(seed: int) -> None:
    """A script draws, steps, pushes nothing and ends epochs; cuts come at any time."""
    rng = random.Random(seed)
    copies = StateCopies()
    sequence = epoch = value = 0
    expected: dict[tuple[int, int], bytes] = {}
    lasts = {0: 0}  # of each push, the last step of the script
    for _ in range(rng.randint(1, 40)):
        match rng.choice(("draw", "step", "nothing", "epoch", "own")):
            case "draw":
                if copies.lacks(epoch):
                    copies.keep(epoch, b"%d" % value)
                    expected[lasts[sequence], epoch] = b"%d" % value
            case "step":
                sequence += 1
                lasts[sequence] = sequence
                copies.step(sequence)
            case "nothing":
                sequence += 1
                lasts[sequence] = lasts[sequence - 1]
            case "epoch":
                epoch += 1
            case "own":
                value += 1
        wanted, in_epoch = rng.randint(0, sequence), rng.randint(0, epoch + 1)
        last = lasts[wanted]
        kept = {e: s for (step, e), s in expected.items() if step == last}
        later = [e for e in kept if e >= in_epoch]
        found = copies.after(wanted, in_epoch)
        if later:
            assert found == kept[min(later)]
        elif last == lasts[sequence]:
            assert found is None
        else:
            assert found == (kept[max(kept)] if kept else b"")


# What is copied, and when


async def test_the_worker_that_leads_keeps_a_copy_as_of_each_step() -> None:
    state, counter = made(), Counter()
    state.register("own", counter)
    for sequence in (1, 2):
        state.draw(LOADER, 0)
        counter.count += 100  # behind the draw: of the next step
        state.draw(LOADER, 0)
        state.step(sequence)
        counter.count += 1
    state.draw(LOADER, 0)
    found = [state.copies.after(sequence, 0) for sequence in (0, 1, 2)]
    assert [decode_states(each or b"") for each in found] == [
        {"own": {"count": count}} for count in (0, 101, 202)
    ]


@pytest.mark.parametrize(
    ("worker_id", "makes_checkpoints", "name"),
    [("b", True, "own"), ("a", False, "own"), ("a", True, "")],
    ids=["another leads", "no checkpoints", "nothing registered"],
)
async def test_else_nothing_is_copied(
    worker_id: str, makes_checkpoints: bool, name: str
) -> None:
    state = made(worker_id, makes_checkpoints=makes_checkpoints)
    if name:
        state.register(name, Counter())
    state.draw(LOADER, 0)
    state.step(1)
    state.draw(LOADER, 1)
    assert state.copies.newest == b""
    assert state.is_sent == (worker_id == "b")


async def test_without_a_loader_it_is_copied_when_the_next_step_begins() -> None:
    state, counter = made(), Counter()
    state.register("own", counter)
    state.step(1)
    counter.count = 5
    state.step(2)
    assert decode_states(state.copies.after(1, 0) or b"") == {"own": {"count": 5}}


async def test_what_a_cut_wants_is_awaited() -> None:
    state, counter = made(), Counter()
    state.register("own", counter)
    state.draw(LOADER, 0)
    state.step(1)
    waiting = asyncio.ensure_future(state.wanted(StateWanted(7, 1, {LOADER: 1})))
    counter.count = 3
    state.draw("another", 9)
    state.draw(LOADER, 0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    counter.count = 4
    state.draw(LOADER, 1)
    assert decode_states(await waiting) == {"own": {"count": 4}}


async def test_a_script_that_is_done_lets_nobody_wait() -> None:
    state, counter = made(), Counter()
    state.register("own", counter)
    state.draw(LOADER, 0)
    state.step(1)
    waiting = asyncio.ensure_future(state.wanted(StateWanted(7, 1, {LOADER: 1})))
    await asyncio.sleep(0)
    counter.count = 3
    last = state.end()
    assert await waiting == last
    assert decode_states(last) == {"own": {"count": 3}}


async def test_a_state_that_can_not_be_stored_any_more_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state, counter = made(), Counter()
    state.register("own", counter)
    counter.count = {1, 2}  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        for sequence in (1, 2):
            state.draw(LOADER, 0)
            state.step(sequence)
    assert state.copies.after(1, 0) == b""
    assert caplog.text.count("own.count is a builtins.set") == 1


# What is loaded


STORED = encode_states({"own": {"count": 7}, "later": {"count": 8}})


async def test_what_is_registered_before_and_after_joining_is_loaded() -> None:
    state, own, later = made(), Counter(), Counter()
    state.register("own", own)
    state.load("step-000000000006", STORED)
    assert own.count == 7
    state.register("later", later)
    assert later.count == 8


async def test_what_nobody_has_registered_yet_stays_in_the_next_checkpoint() -> None:
    state = made()
    state.load("step-000000000006", STORED)
    own = Counter()
    state.register("own", own)
    own.count = 9
    state.draw(LOADER, 0)
    assert decode_states(state.copies.newest) == {
        "own": {"count": 9},
        "later": {"count": 8},
    }


async def test_a_name_that_the_checkpoint_lacks_stays_as_it_is_and_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state, own = made(), Counter()
    own.count = 3
    state.load("step-000000000006", STORED)
    with caplog.at_level(logging.WARNING):
        state.register("new", own)
    assert own.count == 3
    assert "step-000000000006" in caplog.text
    assert "has no state of 'new'" in caplog.text


async def test_a_damaged_state_is_named() -> None:
    with pytest.raises(SnapshotError, match="step-000000000006 is damaged"):
        made().load("step-000000000006", STORED[:-1])


async def test_a_scheduler_sets_the_rates_that_it_had() -> None:
    def scheduled() -> torch.optim.lr_scheduler.ExponentialLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    before, after = scheduled(), scheduled()
    for _ in range(3):
        before.optimizer.step()
        before.step()
    state = made()
    state.load("step-000000000006", encode_states({"rates": before.state_dict()}))
    state.register("rates", after)
    rates = [each.optimizer.param_groups[0]["lr"] for each in (before, after)]
    assert rates == [0.1 * 0.5**3] * 2
    assert after.last_epoch == 3


async def test_names_are_of_one_object_each_and_states_of_plain_values() -> None:
    state, own = made(), Counter()
    state.register("own", own)
    state.register("own", own)
    with pytest.raises(ConfigurationError, match="another object has this name"):
        state.register("own", Counter())
    own.count = object()  # type: ignore[assignment]
    with pytest.raises(NotStorableError, match=r"other\.count is a builtins\.object"):
        state.register("other", own)
