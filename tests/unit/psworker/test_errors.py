import pytest

from pswire.reasons import CATALOGUE, ErrorReason, Refusal
from psworker import errors
from psworker.errors import ERROR_CLASSES, PsError, error_of_refusal


def test_every_reason_has_an_exception_class() -> None:
    assert set(ERROR_CLASSES) == set(ErrorReason)


@pytest.mark.parametrize("reason", ErrorReason)
def test_a_refusal_becomes_its_class_with_reason_facts_and_cure(
    reason: ErrorReason,
) -> None:
    error = error_of_refusal(Refusal(reason, "it went wrong", shard=3))

    assert type(error) is ERROR_CLASSES[reason]
    assert error.reason == reason
    assert error.facts == {"shard": "3"}
    assert str(error) == f"it went wrong; {CATALOGUE[reason].cure}"


def test_a_cure_that_came_over_the_wire_is_not_repeated() -> None:
    refusal = Refusal(ErrorReason.JOB_ENDED, "the job is over")

    error = error_of_refusal(Refusal(ErrorReason.JOB_ENDED, refusal.text))

    assert str(error) == refusal.text


def test_the_tree_in_the_docstring_names_every_class() -> None:
    classes = {
        name
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, PsError)
    }

    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in classes)
    assert all(issubclass(each, PsError) for each in ERROR_CLASSES.values())


def test_errors_are_also_the_builtin_ones_that_callers_know() -> None:
    assert issubclass(errors.ConfigurationError, ValueError)
    assert issubclass(errors.ConnectError, ConnectionError)
    assert issubclass(errors.StepTimeoutError, TimeoutError)
