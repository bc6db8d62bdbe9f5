"""Hostile and malformed input, one row for each case, against one job that trains.

After each row the two members step, with the numbers that they would have without; no
daemon has grown or keeps a call, and what was refused has changed nothing. At the end
the job's histories are checked. The table is in `hostile_table.py`, and
`test_attacked_job.py` does the same to processes with TLS.

Every field of every call is changed by `tests/property/test_hostile_fields.py`, and
bytes are by `test_hostile_messages.py`; what is here is decided on the way to them, or
by more than one call. `ELSEWHERE` says which tests show the cases that are not here.
"""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import torch
from torch import nn

from psctl.check_history import check_history
from psserver.config import ListenConfig
from pswire.addresses import Address
from tests.doubles.resident_memory import MIB, resident_of
from tests.integration.forged_calls import WATCH, Target, assert_readable
from tests.integration.hostile_table import LIMITS, ROWS
from tests.integration.job import Job, connect, run_workers

ROOT: Final = Path(__file__).resolve().parents[1]

GROWTH_MIB_MAX: Final = 48
"""Of all daemons, the members and the attacker, which are one process: a message of
8 MiB is several times in its memory while it is sent and received."""

NAMES: Final = ("w0", "w1")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("hostile-input")
    history = folder / "history"
    history.mkdir()
    with (
        pytest.MonkeyPatch.context() as patch,
        Job(
            folder,
            sockets=True,
            workers_min=2,
            limits=LIMITS,
            history=f"{history}/",
            admin=ListenConfig(address=Address("127.0.0.1", 0)),
            checkpoint_url=str(folder / "checkpoints"),
        ) as job,
        ExitStack() as stack,
    ):
        # What ends a push that lacks its trailer looks at it so often.
        patch.setattr("psserver.shard.rpc.parameter_service.WAITING_INTERVAL_MS", 50)
        patch.setattr("psserver.edge.admin.UNREAD_KEPT_S", 0.0)
        members = {name: stack.enter_context(connect(job, name)) for name in NAMES}
        trained = run_workers(
            dict.fromkeys(NAMES, lambda name: _prepared(members[name]))
        )
        threads = stack.enter_context(ThreadPoolExecutor(len(NAMES)))
        expected = [1.0]

        def step() -> None:
            expected[0] -= 0.125
            list(threads.map(lambda name: _step(*trained[name]), NAMES))
            for model, _ in trained.values():
                for value in model.parameters():
                    torch.testing.assert_close(
                        value.detach(),
                        torch.full_like(value, expected[0]),
                        rtol=0,
                        atol=0,
                    )

        step()
        with (
            grpc.insecure_channel(job.shard_addresses()[0]) as channel,
            grpc.insecure_channel(job.address) as coordinator,
        ):
            for each in (channel, coordinator):
                watch: Any = each.unary_stream(WATCH)
                stack.callback(watch(b"").cancel)  # so that neither is ever idle
            yield Target(job, channel, coordinator, step)
    report = check_history([history])
    assert report.is_clean, report.findings.breaks


def _prepared(ps: Any) -> tuple[nn.Module, torch.optim.Optimizer]:  # noqa: ANN401
    model = nn.ParameterList([torch.ones(1024), torch.ones(1024)])
    prepared: tuple[nn.Module, torch.optim.Optimizer] = ps.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.125)
    )
    return prepared


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


ELSEWHERE: Final = {
    "8": (
        "integration/test_access.py",
        "test_whoever_shows_no_valid_token_hears_the_same",
    ),
    "9": (
        "integration/test_access.py",
        "test_a_role_may_call_what_the_table_says_and_nothing_else",
    ),
    "10": (
        "integration/test_access.py",
        "test_a_token_of_a_worker_speaks_for_no_other_one",
    ),
    "33": (
        "integration/test_errors.py",
        "test_a_gradient_that_is_not_finite_skips_the_clock_for_all",
    ),
    "35": (
        "integration/test_hostile_rows.py",
        "test_forged_rows_change_nothing",
    ),
    "39": (
        "unit/psserver/shard/rpc/test_snapshot_answers.py",
        "test_all_machines_together_hold_so_many_answers",
    ),
    "41": (
        "unit/psserver/edge/test_open_calls.py",
        "test_an_answer_that_is_not_read_ends_with_its_connection",
    ),
    "46": (
        "integration/test_access.py",
        "test_a_role_may_call_what_the_table_says_and_nothing_else",
    ),
    "53": (
        "unit/pswire/checkpoint/test_folder.py",
        "test_a_newer_format_is_refused_and_not_skipped",
    ),
    "54": (
        "unit/pswire/checkpoint/test_folder.py",
        "test_a_damaged_one_is_named_and_the_one_before_it_is_used",
    ),
    "55": (
        "unit/pswire/checkpoint/test_parts.py",
        "test_changed_bytes_are_named_with_their_place",
    ),
    "56": (
        "unit/pswire/checkpoint/test_folder.py",
        "test_parts_of_two_checkpoints_are_no_checkpoint",
    ),
    "59": (
        "unit/pswire/checkpoint/test_storage.py",
        "test_only_files_are_read",
    ),
    "60": (
        "unit/psctl/test_checkpoints.py",
        "test_pickles_are_refused",
    ),
    "62": (
        "unit/pswire/checkpoint/test_folder.py",
        "test_values_that_are_not_finite_are_not_gone_on_from",
    ),
}
"""Cases of the list that are shown where what they need is at hand. There is no log of
updates, so that 61 has nothing to be about."""


@pytest.mark.parametrize("name", ROWS)
def test_hostile_input_is_refused_and_disturbs_nobody(
    target: Target, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ROWS[name]
    if case.is_slow:  # the others have to be in time, too
        monkeypatch.setattr("psserver.edge.admin.REQUEST_S", 1.0)
    before, taken = target.state(), resident_of(os.getpid()).own

    outcome, text = case.attack(target)

    assert re.match(case.outcome, outcome), (outcome, text)
    assert re.search(case.words, text, re.DOTALL), text
    if text:
        assert_readable(text)
    assert target.state() == before
    growth = resident_of(os.getpid()).own - taken
    assert growth < GROWTH_MIB_MAX * MIB, f"{growth >> 20} MiB more"
    target.step()


@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_is_not_here_is_elsewhere(case: str) -> None:
    path, name = ELSEWHERE[case]
    assert f"def {name}(" in (ROOT / path).read_text()
