"""What a job promises about samples: checked, and looked up."""

import math
from dataclasses import replace
from typing import Any

import pytest

from pswire.job_terms import JobTerms
from pswire.job_terms_codec import dump_terms, load_terms
from pswire.privacy import PARTICIPATION_COUNT_MAX, Privacy
from pswire.reasons import ErrorReason
from pswire.schema_codec import read_terms, terms_fields
from pswire.v1 import coordinator_service_pb2 as pb
from tests.doubles.core_values import TERMS
from tests.refusals import refused

PRIVACY = Privacy(1.5, 0.1, 1e-5, (2.0, 3.0, 3.5))


def test_figures_are_looked_up_by_participations() -> None:
    assert PRIVACY.participation_max == 3
    found = [PRIVACY.epsilon_after(count) for count in range(5)]
    assert found == [0.0, 2.0, 3.0, 3.5, math.inf]


def test_it_goes_over_the_wire_and_into_files() -> None:
    terms = replace(TERMS, privacy=PRIVACY)
    request = pb.JoinRequest(**terms_fields(terms))
    assert read_terms(pb.JoinRequest.FromString(request.SerializeToString())) == terms
    assert load_terms(dump_terms(terms)) == terms
    written = dump_terms(TERMS)
    del written["privacy"]  # of a release before
    assert load_terms(written) == JobTerms(
        schema=TERMS.schema, optimizers=TERMS.optimizers
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"max_grad_norm": -1.0},
        {"max_grad_norm": math.inf},
        {"delta": 0.0},
        {"delta": 1.0},
        {"epsilons": ()},
        {"epsilons": (2.0, 1.0)},
        {"epsilons": (1.0, math.nan)},
        {"epsilons": (math.nan,)},
        {"epsilons": (1.0, math.inf)},
        {"epsilons": (-1.0,)},
        {"epsilons": tuple(map(float, range(PARTICIPATION_COUNT_MAX + 1)))},
    ],
)
def test_what_is_none_is_refused(changes: dict[str, Any]) -> None:
    terms = replace(TERMS, privacy=replace(PRIVACY, **changes))
    with refused(ErrorReason.MALFORMED_MESSAGE, "is no differential privacy"):
        read_terms(pb.JoinRequest(**terms_fields(terms)))


def test_figures_of_two_machines_may_differ_in_their_last_bits() -> None:
    near = replace(PRIVACY, epsilons=(2.0, 3.0, 3.5 * (1 + 1e-12)))
    assert PRIVACY.agrees_with(near)
    for other in (
        None,
        replace(PRIVACY, epsilons=(2.0, 3.0)),
        replace(PRIVACY, epsilons=(1.9, 3.0, 3.5)),
        replace(PRIVACY, noise_multiplier=1.5 + 1e-9),
        replace(PRIVACY, delta=2e-5),
    ):
        assert not PRIVACY.agrees_with(other)
