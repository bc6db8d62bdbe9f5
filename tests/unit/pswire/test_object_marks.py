import pytest

from pswire.limits import NAME_BYTES_MAX
from pswire.object_marks import (
    LOADER,
    MARK_COUNT_MAX,
    MODEL,
    ObjectMark,
    check_marks,
    doubts,
    exchanged,
    order_difference,
)
from pswire.reasons import ErrorReason
from tests.refusals import refused


def mark(
    name: str,
    structure: str,
    content: str = "",
    *,
    kind: str = MODEL,
    named: bool = False,
) -> ObjectMark:
    return ObjectMark(
        kind=kind,
        name=name,
        described=f"Class{structure}",
        structure=structure,
        content=content,
        named=named,
    )


@pytest.mark.parametrize(
    ("job", "here", "moved"),
    [
        ("ab", "ab", {}),
        ("ab", "ba", {0: 1, 1: 0}),
        ("abc", "bca", {0: 1, 1: 2, 2: 0}),
        ("abc", "acb", {1: 2, 2: 1}),
        ("abcx", "bacy", {0: 1, 1: 0}),  # one that differs hides no exchange
        ("ab", "xy", {}),
        ("ab", "xa", {}),  # one has what the other had, and not the other way round
        ("ab", "aa", {}),
        ("ab", "bb", {}),
        ("aab", "baa", {}),  # which of the equals it is nobody knows
        ("abc", "bba", {}),
        ("ab", "b", {}),
        ("", "ab", {}),
    ],
)
def test_an_exchange_is_a_cycle_of_what_is_there_once(
    job: str, here: str, moved: dict[int, int]
) -> None:
    of_job, of_here = ({str(i): d for i, d in enumerate(each)} for each in (job, here))
    expected = {str(name): str(target) for name, target in moved.items()}
    assert exchanged(of_job, of_here) == expected


def test_models_of_other_classes_in_another_order_are_named_with_both_orders() -> None:
    job = (mark("model", "A"), mark("model1", "B"))
    here = (mark("model", "B"), mark("model1", "A"))

    assert order_difference(job, here, MODEL) == [
        "! model: ClassA in the job, ClassB here, which is model1 in the job",
        "! model1: ClassB in the job, ClassA here, which is model in the job",
    ]
    assert not order_difference(job, job, MODEL)
    assert not order_difference(job, here, LOADER)


@pytest.mark.parametrize(("kind", "what"), [(MODEL, "first values"), (LOADER, "data")])
def test_equals_in_another_order_are_told_by_their_contents(
    kind: str, what: str
) -> None:
    job = (mark("a", "A", "1", kind=kind), mark("b", "A", "2", kind=kind))
    here = (mark("a", "A", "2", kind=kind), mark("b", "A", "1", kind=kind))

    assert order_difference(job, here, kind) == [
        f"! a: here with the {what} of the job's b (ClassA)",
        f"! b: here with the {what} of the job's a (ClassA)",
    ]


def test_a_name_that_was_given_holds_whatever_the_contents() -> None:
    job = (mark("a", "A", "1"), mark("b", "A", "2"))
    here = (mark("a", "A", "2", named=True), mark("b", "A", "1", named=True))

    assert not order_difference(job, here, MODEL)
    assert not order_difference(here, job, MODEL)
    assert not doubts(job, here)


def test_equals_that_nothing_tells_apart_are_doubted() -> None:
    job = (mark("a", "A", "1"), mark("b", "A", "2"))
    here = (mark("a", "A", "3"), mark("b", "A", "4"))

    (line,) = doubts(job, here)
    assert line.startswith("a and b are of one class with equal tensors")
    assert "generator=G" in line
    assert not doubts(job, job)


def test_a_model_of_another_class_with_the_same_tensors_is_doubted() -> None:
    (line,) = doubts((mark("a", "A"),), (mark("a", "B", named=True),))
    assert "(ClassA in the job, ClassB here)" in line


@pytest.mark.parametrize(
    "marks",
    [
        (mark("a" * (NAME_BYTES_MAX + 1), "A"),),
        (mark("a", "A", "c" * (NAME_BYTES_MAX + 1)),),
        (mark("a", "A"),) * (MARK_COUNT_MAX + 1),
    ],
)
def test_marks_beyond_the_limits_are_refused(marks: tuple[ObjectMark, ...]) -> None:
    with refused(ErrorReason.LIMIT_EXCEEDED):
        check_marks(marks)
