"""Hostile and malformed input against a job of processes with TLS.

The table is that of `test_hostile_input.py`. Whoever may call what a row calls attacks
members that wait, and has to be refused as there; who may not attacks while they train.
All daemons live through it and grow by little, and in the end the job's histories are
clean, and its values those of a job that nobody has attacked.
"""

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Final

import pytest

from tests.doubles.children import Nursery
from tests.integration.attacked_job import (
    AttackedJob,
    AttackedTarget,
    Attacker,
    Kind,
)
from tests.integration.forged_calls import assert_readable
from tests.integration.hostile_table import CLOSED, ROWS

GROWTH_MIB_MAX: Final = 48
"""Of each process, by one row and by all of them: what a row has needed is used again
by the others."""

REFUSED: Final = {
    (Kind.CERTIFICATES, Attacker.READER): f"PERMISSION_DENIED|{CLOSED}",
    (Kind.CERTIFICATES, Attacker.STRANGER): f"UNAVAILABLE|{CLOSED}",
    (Kind.TOKENS, Attacker.READER): f"PERMISSION_DENIED|{CLOSED}",
    (Kind.TOKENS, Attacker.STRANGER): f"UNAUTHENTICATED|{CLOSED}",
}
"""How a call ends that gets as far as to be asked who makes it: where certificates are,
a stranger has no connection."""


ALWAYS: Final = frozenset(
    {
        "1 no message",
        "4 message announced",
        "6 compressed bomb",
        "16 closed start of a worker",
        "24 product beyond 64 bits",
        "32 another digest",
        "38 staleness bound",
        "44 live name",
        "48 calls of a machine",
        "a push that stops",
    }
)
"""Rows of `make test`: one or two for each place that refuses. `make attack` has all,
and a job that knows its callers by tokens too."""


@pytest.fixture(
    scope="module",
    params=[Kind.CERTIFICATES, pytest.param(Kind.TOKENS, marks=pytest.mark.repeat)],
)
def job(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    nursery: Nursery,
) -> Iterator[AttackedJob]:
    folder = tmp_path_factory.mktemp("attacked")
    with AttackedJob(folder, nursery, request.param) as made:
        yield made


@pytest.fixture(scope="module")
def resident(job: AttackedJob) -> dict[str, int]:
    """What all processes have taken before the first attack."""
    return job.resident()


@pytest.fixture(scope="module")
def target(job: AttackedJob) -> Iterator[AttackedTarget]:
    made = AttackedTarget(job, Attacker.ENTITLED)
    yield made
    made.close()


def check_growth(job: AttackedJob, before: dict[str, int]) -> None:
    grown = {name: (now - before[name]) >> 20 for name, now in job.resident().items()}
    assert max(grown.values()) < GROWTH_MIB_MAX, f"MiB more: {grown}"


@pytest.mark.parametrize(
    "name",
    [
        name if name in ALWAYS else pytest.param(name, marks=pytest.mark.repeat)
        for name in ROWS
    ],
)
def test_who_may_call_is_refused_as_the_table_says(
    job: AttackedJob, target: AttackedTarget, resident: dict[str, int], name: str
) -> None:
    case = ROWS[name]
    before = target.state()

    outcome, text = case.attack(target)

    assert re.match(case.outcome, outcome), (outcome, text)
    assert re.search(case.words, text, re.DOTALL), text
    if text:
        assert_readable(text)
    assert target.state() == before
    target.step()
    check_growth(job, resident)


@pytest.mark.parametrize(
    "attacker",
    [pytest.param(Attacker.READER, marks=pytest.mark.repeat), Attacker.STRANGER],
)
def test_who_may_not_call_disturbs_no_training(
    job: AttackedJob, resident: dict[str, int], attacker: Attacker
) -> None:
    before, refused = job.lasting_state(), REFUSED[job.kind, attacker]
    wrong: dict[str, tuple[str, str]] = {}
    job.release()
    with closing(AttackedTarget(job, attacker)) as target:
        for name, case in ROWS.items():
            if case.is_slow:
                continue  # it is tried beside members that wait
            found = outcome, text = case.attack(target)
            if not re.match(f"{refused}|{case.outcome}", outcome):
                wrong[name] = found
            if text:
                assert_readable(text)
            job.check_training()
    job.hold()
    assert not wrong
    assert job.lasting_state() == before
    check_growth(job, resident)
