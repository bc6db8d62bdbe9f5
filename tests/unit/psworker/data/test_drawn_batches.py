"""Which batches a push is of, told from what a script did."""

import copy
import logging
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from pswire.leased_data import DataRange
from psworker.data.batch_tensors import BatchTensors, watch_calls
from psworker.data.drawn_batches import BATCH_COUNT_MAX, Batch, DrawnBatches
from psworker.data.pending import PendingData


@dataclass
class Memory:
    is_alive: bool = True


@dataclass
class Inputs:
    """A call with the memory of some batches, or of none."""

    row_count: int | None = None
    memories: tuple[object, ...] = ()
    is_moved: bool = False

    def are_of(self, memory: object) -> bool:
        return any(memory is each for each in self.memories)

    def are_elsewhere(self, memory: object) -> bool:
        return self.is_moved


class Script:
    """What a script does, and what its steps weigh."""

    def __init__(self, optimizer_count: int = 1) -> None:
        self.drawn = DrawnBatches(optimizer_count)
        self.batches: list[Batch] = []
        self.passed_over: list[int] = []

    def draw(self, size: int, loader: str = "loader") -> None:
        where = DataRange(loader, 0, len(self.batches), len(self.batches) + 1)
        self.batches.append(Batch(loader, size, where, Memory()))
        self.drawn.draw(self.batches[-1])

    def call(
        self, *of: int, rows: int | None = None, is_moved: bool = False
    ) -> tuple[Batch, ...]:
        memories = tuple(self.batches[index].memory for index in of)
        return self.drawn.call(Inputs(rows, memories, is_moved))

    def train(self, *of: int, rows: int | None = None, is_moved: bool = False) -> None:
        self.drawn.reach(self.call(*of, rows=rows, is_moved=is_moved))

    def drop(self, *indexes: int) -> None:
        for index in indexes:
            self.batches[index].memory = Memory(is_alive=False)

    def step(self) -> list[int]:
        pushed = self.drawn.push()
        self.passed_over += map(self.batches.index, pushed.passed_over)
        return [self.batches.index(each) for each in pushed.trained]


def test_a_batch_whose_loss_was_thrown_away_is_behind_no_step() -> None:
    script = Script()
    script.draw(2)
    script.call(0)
    script.draw(2)
    script.drop(0)
    script.train(1)
    assert script.step() == [1]
    assert script.passed_over == [0]


@pytest.mark.parametrize("is_known", [True, False])
def test_one_batch_drawn_ahead_shifts_no_step(*, is_known: bool) -> None:
    """Also where the script has made other tensors of it, as on another device."""
    script = Script()
    script.draw(1)
    for number in range(5):
        if number < 4:
            script.draw(number + 2)
        else:
            script.drawn.end("loader")
        if is_known:
            script.train(number)
        else:
            script.drop(*range(len(script.batches)))
            script.train(rows=number + 1, is_moved=True)
        assert script.step() == [number]
    assert script.passed_over == []


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("sizes", [[4] * 9, [4, 4, 1, 3, 2, 5, 5, 5, 1]])
def test_batches_drawn_ahead_by_any_number(depth: int, sizes: list[int]) -> None:
    script = Script()
    waiting = list(sizes)
    for number, size in enumerate(sizes):
        while waiting and len(script.batches) <= number + depth:
            script.draw(waiting.pop(0))
        if not waiting:
            script.drawn.end("loader")
        script.train(rows=size, is_moved=True)
        assert script.step() == [number]


def test_a_batch_skipped_before_any_call_is_told_by_its_rows() -> None:
    script = Script()
    script.draw(2)
    script.draw(5)
    script.drop(0, 1)
    script.train(rows=5, is_moved=True)
    assert script.step() == [1]
    assert script.passed_over == [0]


def test_a_batch_skipped_before_any_call_is_told_by_being_gone() -> None:
    script = Script()
    script.draw(2)
    script.draw(2)
    script.drop(0)
    script.train(rows=2)
    assert script.step() == [1]


def test_batches_in_one_call_count_together() -> None:
    script = Script()
    script.draw(2)
    script.draw(3)
    script.train(rows=5)
    assert script.step() == [0, 1]


def test_one_backward_pass_of_many_calls_counts_all_of_them() -> None:
    script = Script()
    calls: list[Batch] = []
    for number in range(3):
        script.draw(2)
        calls += script.call(number)
    script.drawn.reach(calls)
    assert script.step() == [0, 1, 2]


def test_an_accumulated_step_counts_what_is_trained_and_leaves_out_the_rest() -> None:
    script = Script()
    for number in range(4):
        script.draw(2)
        if number != 1:
            script.train(number)
        script.drop(number)
    assert script.step() == [0, 2, 3]
    assert script.passed_over == [1]


def test_zeroed_gradients_take_their_batches_with_them() -> None:
    script = Script()
    script.draw(2)
    script.train(0)
    script.drawn.throw_away()
    script.draw(3)
    script.train(1)
    assert script.step() == [1]


def test_a_batch_that_is_tried_again_after_its_gradient_was_zeroed_counts() -> None:
    script = Script()
    script.draw(2)
    script.train()
    script.drawn.throw_away()
    script.train()
    assert script.step() == [0]


@pytest.mark.parametrize("is_known", [True, False])
def test_two_optimizers_step_on_one_batch_with_another_drawn_ahead(
    *, is_known: bool
) -> None:
    script = Script(optimizer_count=2)
    script.draw(4)
    for number in range(3):
        script.draw(4)
        script.train(*([number] if is_known else []), rows=4)  # real
        script.train(rows=4)  # what the generator has made
        assert script.step() == [number]
        script.train(rows=4)
        assert script.step() == []


def test_batches_of_two_loaders_in_one_step_add_up() -> None:
    script = Script()
    script.draw(2, "labelled")
    script.draw(6, "unlabelled")
    script.train(0)
    script.train(1)
    assert script.step() == [0, 1]


def test_a_batch_that_is_pushed_is_in_no_later_push() -> None:
    script = Script()
    script.draw(2)
    call = script.call(0)
    script.drawn.reach(call)
    assert script.step() == [0]
    script.drawn.reach(call)
    assert script.step() == []


def test_a_call_of_a_pushed_batch_takes_none_that_is_drawn_ahead() -> None:
    script = Script()
    script.draw(2)
    script.draw(2)
    script.train(0)
    assert script.step() == [0]
    script.train(0)
    assert script.step() == []


def test_a_batch_that_the_script_keeps_for_later_counts_when_it_is_trained() -> None:
    script = Script()
    script.draw(2)
    script.draw(3)
    script.train(1)
    assert script.step() == [1]
    script.train(0)
    assert script.step() == [0]


def test_what_is_drawn_for_ever_without_a_step_is_skipped_from_the_oldest() -> None:
    drawn = DrawnBatches()
    made = [Batch("loader", 1) for _ in range(BATCH_COUNT_MAX + 2)]
    old = [each for batch in made for each in drawn.draw(batch)]
    assert old == made[:2]


def test_only_a_difference_that_matters_leaves_a_doubt() -> None:
    script = Script()
    script.draw(2)
    script.draw(3)
    script.train(rows=50, is_moved=True)
    assert script.drawn.in_doubt == (2, 3)
    equal = Script()
    equal.draw(2)
    equal.draw(2)
    equal.train(rows=50, is_moved=True)
    assert equal.drawn.in_doubt == ()


def test_unseen_calls_are_of_what_the_script_still_holds() -> None:
    script = Script()
    script.draw(2)
    script.drop(0)
    script.draw(3)
    script.drawn.reach_unseen()
    assert script.step() == [1]


def test_a_gradient_of_batches_that_others_have_now_counts_for_nothing() -> None:
    """The worker has joined again, and its script has some of the start before."""
    script = Script()
    script.draw(2)
    call = script.call(0)
    script.draw(2)
    script.drawn.lose()
    script.draw(2)
    script.drawn.reach(call)
    pushed = script.drawn.push()
    assert (pushed.trained, pushed.is_of_lost) == ((), True)
    script.train(1)
    script.train(2)
    pushed = script.drawn.push()
    assert (pushed.trained, pushed.is_of_lost) == ((script.batches[2],), True)
    script.draw(2)
    script.train(3)
    pushed = script.drawn.push()
    assert (pushed.trained, pushed.is_of_lost) == ((script.batches[3],), False)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_in_hand_is_what_is_held_or_was_drawn_ahead(*, is_ahead: bool) -> None:
    """A script makes other tensors of its batches: only their order tells them."""
    script = Script()
    script.draw(2)
    if is_ahead:
        script.draw(2)
    script.train(0)
    script.step()
    if not is_ahead:
        script.draw(2)  # and skips it
    script.drop(0, 1)
    script.drawn.lose()
    script.draw(2)
    script.drop(2)
    script.train(rows=2, is_moved=True)
    assert script.drawn.push().is_of_lost is is_ahead


def test_a_split_of_the_scripts_own_stays_its_own() -> None:
    drawn = DrawnBatches()
    batch = Batch("loader", 2, memory=Memory())
    drawn.draw(batch)
    drawn.lose()
    drawn.reach(drawn.call(Inputs(2)))
    pushed = drawn.push()
    assert pushed.trained == (batch,)
    assert not pushed.is_of_lost


def test_a_script_that_draws_ahead_has_batches_in_hand_until_it_used_them() -> None:
    script = Script()
    script.draw(2)
    for number in range(3):
        script.draw(2)
        script.train(number)
        script.step()
        assert script.drawn.has_ahead("loader")
    script.train(3)
    assert not script.drawn.has_ahead("loader")


def test_before_the_first_step_two_batches_that_are_held_are_drawn_ahead() -> None:
    script = Script()
    script.draw(2)
    assert not script.drawn.has_ahead("loader")
    script.draw(2)
    assert script.drawn.has_ahead("loader")
    script.drop(0)
    assert not script.drawn.has_ahead("loader")


@pytest.mark.parametrize("is_called", [True, False])
def test_a_script_that_skips_batches_has_none_in_hand(*, is_called: bool) -> None:
    """Also while a variable of its loop still holds the last one."""
    script = Script()
    for number in range(4):
        script.draw(2)
        if number % 2 == 0:
            script.train(number)
            script.step()
        elif is_called:
            script.call(number)
        script.drop(*range(number))
        assert not script.drawn.has_ahead("loader")


def test_batches_are_open_until_a_step_or_the_end_of_their_iteration() -> None:
    script = Script()
    assert not script.drawn.has_open("loader")
    script.draw(2)
    script.draw(2)
    script.train(0)
    assert script.drawn.has_open("loader")
    script.step()
    assert script.drawn.has_open("loader")
    script.drawn.give_up("loader")
    assert not script.drawn.has_open("loader")


# With tensors


class Job:
    """A model, and what its steps carry."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model or nn.Linear(1, 1)
        self.pending = PendingData()
        parameters = list(self.model.parameters())
        self.pending.watch(lambda: False, parameters=parameters, optimizer_count=1)
        watch_calls([self.model], self.pending)

    def draw(self, rows: int, start: int = 0) -> torch.Tensor:
        batch = torch.ones(rows, 1)
        where = DataRange("loader", 0, start, start + rows)
        self.pending.draw(rows, where, memory=BatchTensors([batch]))
        return batch


def test_a_view_of_a_batch_is_the_batch() -> None:
    job = Job()
    first, second = job.draw(4), job.draw(4, 4)
    job.model(second.view(2, 2, 1)[:1]).sum().backward()
    assert job.pending.take().ranges == (DataRange("loader", 0, 4, 8),)
    del first


def test_views_of_one_data_set_are_told_apart() -> None:
    job = Job()
    data = torch.ones(8, 1)
    for start in (0, 4):
        memory = BatchTensors(data[start : start + 4])
        job.pending.draw(4, DataRange("loader", 0, start, start + 4), memory=memory)
    job.model(data[4:]).sum().backward()
    assert [each.start for each in job.pending.take().ranges] == [4]


def test_a_loss_of_several_calls_counts_the_batches_of_all() -> None:
    job = Job()
    loss = torch.zeros(())
    for number in range(3):
        loss = loss + job.model(job.draw(2, 2 * number) * 2).sum()
    loss.backward()
    assert job.pending.take().sample_count == 6


def test_a_gradient_that_the_model_has_zeroed_takes_its_batch_with_it() -> None:
    job = Job()
    job.model(job.draw(2)).sum().backward()
    job.model.zero_grad()
    job.model(job.draw(3, 2)).sum().backward()
    assert job.pending.take().sample_count == 3


def test_no_call_without_gradients_is_noted() -> None:
    job = Job()
    first, second = job.draw(2), job.draw(3, 2)
    with torch.no_grad():
        job.model(first)
    job.model(second).sum().backward()
    assert job.pending.take().sample_count == 3


def test_a_doubt_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            kept = job.draw(2), job.draw(3)
            job.model(torch.ones(50, 1)).sum().backward()
            job.pending.take()
            del kept
    assert caplog.text.count("step(weight=n)") == 1


def test_a_copy_of_a_watched_model_is_plain_and_it_compiles_whole() -> None:
    job = Job()
    batch = job.draw(2)
    for twin in (copy.deepcopy(job.model), pickle.loads(pickle.dumps(job.model))):
        twin(batch).sum().backward()
        assert not job.pending.has_trained
    compiled = torch.compile(job.model, backend="eager", fullgraph=True)
    compiled(batch)
    assert not job.pending.has_trained


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_watched_model_and_its_copy_can_be_scripted() -> None:
    job = Job(nn.Sequential(nn.Linear(1, 1)))
    batch = job.draw(2)
    torch.jit.trace(job.model, batch)
    for model in (job.model, copy.deepcopy(job.model), nn.Sequential(job.model)):
        assert torch.equal(torch.jit.script(model)(batch), model(batch))


# Rounds


def continued(script: str, *, optimizer_count: int = 2) -> str:
    """Of each step whether it goes on with the round before.

    Args:
        script: What is done, one letter each: `a` and `b` draw from a loader, `A` and
            `B` train on its oldest batch, `x` ends both loaders, and numbers step an
            optimizer.
        optimizer_count: Optimizers of the script.

    Returns:
        For each step `+` if it does, and `|` if it begins one.
    """
    drawn = DrawnBatches(optimizer_count)
    batches: dict[str, list[Batch]] = {"a": [], "b": []}
    found = ""
    for number, what in enumerate(script.replace(" ", "")):
        if what in batches:
            batch = Batch(what, 4, DataRange(what, 0, number, number + 1), Memory())
            batches[what].append(batch)
            drawn.draw(batch)
        elif what.lower() in batches:
            drawn.call(Inputs(None, (batches[what.lower()][0].memory,)))
            drawn.reach([batches[what.lower()].pop(0)])
        elif what == "x":
            drawn.end("a")
            drawn.end("b")
        else:
            goes_on = drawn.goes_on(what)
            found += "+" if drawn.push(what).continues_round else "|"
            if "aa" not in script:  # nobody knows before what was drawn ahead
                assert goes_on == (found[-1] == "+")
    return found


@pytest.mark.parametrize(
    ("script", "found"),
    [
        # One optimizer, also with skipped batches and accumulated gradients.
        ("aA1 aA1 a aA1 aAaA1", "||||"),
        # Two on a batch; the first or the second is of noise alone.
        ("aA12 aA12 aA12", "|+|+|+"),
        ("a2A1 a2A1 a2A1", "|+|+|+"),
        # A critic that steps on several batches for one step of the generator.
        ("aA1 aA1 aA12 aA1 aA1 aA12", "|||+|||+"),
        # One optimizer that steps several times on a batch.
        ("aA111 aA111", "|++|++"),
        # Batches drawn ahead.
        ("aaa A12 A12 A12", "|+|+|+"),
        # Another loader for the second step, be it not in each round.
        ("aA1bB2 aA1bB2 aA12 aA1bB2", "|+|+|+|+"),
        # Loaders in turn.
        ("aA12 aA12 x bB12 bB12", "|+|+|+|+"),
        # None at all, and after the end of the data.
        ("12 12 12", "|+|+|+"),
        ("1 1 1", "|||"),
        ("aA12 x 12 12", "|+|+|+"),
    ],
)
def test_a_step_begins_a_round_of_the_loop_or_goes_on_with_it(
    script: str, found: str
) -> None:
    assert continued(script) == found
