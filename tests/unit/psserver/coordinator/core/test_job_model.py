"""Every worker must train what the first one told, and is told how it differs."""

from dataclasses import replace

import pytest

from psserver.coordinator.core.coordinator_effects import SchemaFixed
from psserver.coordinator.core.job_model import (
    DECLARED_ENTRY_COUNT_MAX,
    DIFFERENCE_LINES_MAX,
    STRATEGY_LENGTH_MAX,
    JobModel,
)
from pswire.job_terms import JobTerms
from pswire.membership import WorkerState
from pswire.object_marks import LOADER, MODEL, ObjectMark
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ElementType, ModelSchema, OptimizerSpec, SchemaEntry
from tests.doubles.core_values import OPTIMIZERS, SCHEMA, sgd
from tests.doubles.driven_coordinator import DrivenCoordinator
from tests.refusals import refused


def schema(*names: str, shape: tuple[int, ...] = (3,)) -> ModelSchema:
    return ModelSchema(
        tuple(
            SchemaEntry(name=name, shape=shape, element_type=ElementType.FLOAT32)
            for name in names
        )
    )


def terms(of: ModelSchema, optimizers: tuple[OptimizerSpec, ...]) -> JobTerms:
    return JobTerms(schema=of, optimizers=optimizers)


def declared_of(model: JobModel) -> tuple[OptimizerSpec, ...]:
    assert model.terms is not None
    return model.terms.declared


def with_rate(rate: float) -> OptimizerSpec:
    (group,) = sgd().groups
    values = (rate, *group.hyperparameters[1:])
    return replace(sgd(), groups=(replace(group, hyperparameters=values),))


def refusal_of(theirs: ModelSchema, *optimizers: OptimizerSpec) -> Refusal:
    model = JobModel()
    model.agree(terms(schema("a"), OPTIMIZERS))
    with pytest.raises(Refusal) as caught:
        model.agree(terms(theirs, optimizers))
    assert model.terms == terms(schema("a"), OPTIMIZERS)
    return caught.value


def test_the_first_word_counts_and_the_same_word_agrees() -> None:
    model = JobModel()
    assert model.byte_count == 0

    assert model.agree(terms(schema("a"), OPTIMIZERS))
    assert not model.agree(terms(schema("a"), (with_rate(0.7),)))

    assert model.byte_count == 12


def test_a_schema_that_is_none_is_refused_and_fixes_nothing() -> None:
    model = JobModel()
    with pytest.raises(Refusal):
        model.agree(terms(schema("a", "a"), ()))
    assert model.schema is None


def test_a_difference_of_shapes_names_the_tensor_and_both_shapes() -> None:
    refusal = refusal_of(schema("a", shape=(4,)), *OPTIMIZERS)
    assert refusal.reason is ErrorReason.SCHEMA_MISMATCH
    assert refusal.message.endswith(
        "! model.a: parameter [3] float32 in the job, parameter [4] float32 here"
    )


def test_a_long_difference_is_cut_short() -> None:
    names = [f"t{number}" for number in range(2 * DIFFERENCE_LINES_MAX)]
    refusal = refusal_of(schema("a", *names), *OPTIMIZERS)
    assert f"and {DIFFERENCE_LINES_MAX} more" in refusal.message
    assert refusal.message.count("\n") == DIFFERENCE_LINES_MAX + 1


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        ((), r"the job has optimizers \['optimizer'\], this worker has \[\]"),
        ((sgd("other"),), r"this worker has \['other'\]"),
        ((replace(sgd(), class_name="Adam"),), "is SGD in the job, Adam here"),
        (
            (replace(sgd(), hyperparameter_names=("lr", "x")),),
            "the torch versions differ",
        ),
        ((sgd(groups=((0,), ())),), r"\[1\] parameters .* in the job, \[1, 0\] here"),
        (
            (replace(sgd(), loss_is_sum=True),),
            'the job has loss="mean", this worker has loss="sum"$',
        ),
    ],
)
def test_a_difference_of_optimizers_is_named(
    theirs: tuple[OptimizerSpec, ...], text: str
) -> None:
    refusal = refusal_of(schema("a"), *theirs)
    assert refusal.reason is ErrorReason.OPTIMIZER_MISMATCH
    with pytest.raises(Refusal, match=text):
        raise refusal
    is_of_loss = any(each.loss_is_sum for each in theirs)
    assert ("prepare() the same" in refusal.cure) is is_of_loss


def test_a_strategy_is_shown_with_its_numbers_and_not_without_end() -> None:
    model = JobModel()
    assert not model.strategy_text
    model.agree(replace(terms(schema("a"), OPTIMIZERS), strategy="DiLoCo()"))
    assert model.strategy_text == "DiLoCo, outer SGD(lr=0.1)"
    model = JobModel()
    model.agree(replace(terms(schema("a"), OPTIMIZERS), strategy="x" * 1000))
    name = f"{'x' * STRATEGY_LENGTH_MAX}..."
    assert model.strategy_text == f"{name}, outer SGD(lr=0.1)"
    model = JobModel()
    model.agree(terms(schema("a"), OPTIMIZERS))
    assert not model.strategy_text


def test_a_worker_alone_brings_other_numbers_of_outer_optimizers() -> None:
    first = replace(terms(schema("a"), OPTIMIZERS), strategy="DiLoCo()")
    later = replace(terms(schema("a"), (with_rate(0.7),)), strategy="DiLoCo()")
    model = JobModel()
    model.agree(first)
    with pytest.raises(Refusal, match=r"SGD\(lr=0.1\), this worker has the outer"):
        model.agree(later)
    assert model.terms == first
    assert not model.agree(first, is_alone=True)
    assert model.agree(later, is_alone=True)
    assert model.terms == later
    near = replace(first, optimizers=(with_rate(0.70000001),))
    for other, rate in ((first, "0.1"), (near, "0.70000001")):
        text = rf"SGD\(lr=0.7\), this worker has .*\(lr={rate}\)"
        with pytest.raises(Refusal, match=text):
            model.agree(other)


def test_a_worker_alone_brings_no_other_strategy_nor_other_state() -> None:
    fixed = replace(sgd(), class_name="RMSprop")
    names = (*sgd().hyperparameter_names[:1], "alpha", "eps", "weight_decay")
    names = (*names, "momentum", "centered", "maximize")
    (group,) = sgd().groups

    def with_momentum(momentum: float) -> JobTerms:
        values = (0.1, 0.9, 1e-8, 0.0, momentum, 0.0, 0.0)
        spec = replace(
            fixed,
            hyperparameter_names=names,
            groups=(replace(group, hyperparameters=values),),
        )
        return replace(terms(schema("a"), (spec,)), strategy="DiLoCo()")

    model = JobModel()
    model.agree(with_momentum(0.5))
    for other, text in (
        (replace(with_momentum(0.5), strategy="EASGD()"), "the job has strategy=DiLo"),
        (replace(with_momentum(0.5), strategy=""), "this worker has no strategy"),
        (replace(with_momentum(0.5), strategy="a\x1b[2J"), r"strategy=a\\x1b\[2J"),
        (with_momentum(0.0), "momentum"),
    ):
        with pytest.raises(Refusal, match=text):
            model.agree(other, is_alone=True)
    assert model.terms == with_momentum(0.5)


def two(name: str, index: int, rate: float = 0.1) -> OptimizerSpec:
    spec = with_rate(rate)
    (group,) = spec.groups
    return replace(spec, name=name, groups=(replace(group, entry_indexes=(index,)),))


def test_the_same_tensors_in_another_order_agree_and_the_order_is_told() -> None:
    model = JobModel()
    model.agree(terms(schema("a", "b", "c"), (two("o", 2),)))
    theirs = schema("c", "a", "b")

    assert not model.agree(terms(theirs, (two("o", 0),)))

    assert model.order_of(theirs) == (2, 0, 1)
    assert model.order_of(schema("a", "b", "c")) == ()
    with pytest.raises(Refusal, match=r"only here model\.a is in group 0"):
        model.agree(terms(theirs, (two("o", 1),)))


def test_a_tied_tensor_is_the_same_by_whichever_name_it_was_registered_first() -> None:
    job, here = (
        ModelSchema((replace(schema(first).entries[0], tied_names=(second,)),))
        for first, second in ("ab", "ba")
    )
    model = JobModel()
    model.agree(terms(job, OPTIMIZERS))
    assert not model.agree(terms(here, OPTIMIZERS))
    assert model.order_of(here) == ()


def test_optimizers_agree_in_any_order_by_name() -> None:
    model = JobModel()
    model.agree(terms(schema("a", "b"), (two("x", 0), two("y", 1))))
    assert not model.agree(terms(schema("a", "b"), (two("y", 1), two("x", 0))))


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (
            (two("x", 1), two("y", 0)),
            r"x: SGD \(lr=0\.1\) over model\.a in the job, SGD \(lr=0\.1\) over "
            r"model\.b here, which is y in the job",
        ),
        ((two("x", 1), two("y", 1)), "'x' groups the parameters otherwise"),
    ],
)
def test_optimizers_in_another_order_are_named_with_both_orders(
    theirs: tuple[OptimizerSpec, ...], text: str
) -> None:
    model = JobModel()
    model.agree(terms(schema("a", "b"), (two("x", 0), two("y", 1))))
    with refused(ErrorReason.OPTIMIZER_MISMATCH, text):
        model.agree(terms(schema("a", "b"), theirs))


def test_two_optimizers_of_the_same_tensors_are_told_by_their_first_rates() -> None:
    model = JobModel()
    model.agree(terms(schema("a"), (two("x", 0, 0.1), two("y", 0, 0.2))))
    with pytest.raises(Refusal, match="optimizers come in another order"):
        model.agree(terms(schema("a"), (two("x", 0, 0.2), two("y", 0, 0.1))))
    # Another rate is no other order: they need not agree.
    assert not model.agree(terms(schema("a"), (two("x", 0, 0.2), two("y", 0, 0.3))))


def marked(*contents: str, structures: str = "AA", kind: str = MODEL) -> ModelSchema:
    marks = tuple(
        ObjectMark(
            kind=kind,
            name=f"model{number or ''}",
            described=structure,
            structure=structure,
            content=content,
        )
        for number, (structure, content) in enumerate(
            zip(structures, contents, strict=True)
        )
    )
    return replace(schema("a", "b"), marks=marks)


@pytest.mark.parametrize(
    ("job", "here", "reason"),
    [
        (marked("1", "2"), marked("2", "1"), ErrorReason.SCHEMA_MISMATCH),
        (
            marked("", "", structures="AB"),
            marked("", "", structures="BA"),
            ErrorReason.SCHEMA_MISMATCH,
        ),
        (
            marked("1", "2", kind=LOADER),
            marked("2", "1", kind=LOADER),
            ErrorReason.DATA_ORDER_MISMATCH,
        ),
    ],
)
def test_models_and_loaders_in_another_order_are_refused(
    job: ModelSchema, here: ModelSchema, reason: ErrorReason
) -> None:
    model = JobModel()
    model.agree(terms(job, OPTIMIZERS))
    with pytest.raises(Refusal, match="in another order than the job's") as caught:
        model.agree(terms(here, OPTIMIZERS))
    assert caught.value.reason is reason
    assert "generator=G" in caught.value.message


def test_models_that_nothing_tells_apart_agree_with_a_doubt() -> None:
    model = JobModel()
    assert model.doubts(marked("1", "2")) == []
    model.agree(terms(marked("1", "2"), OPTIMIZERS))
    here = marked("3", "4")
    assert not model.agree(terms(here, OPTIMIZERS))
    assert len(model.doubts(here)) == 1


def test_the_first_worker_fixes_what_is_trained() -> None:
    job = DrivenCoordinator(workers_min=3)
    job.add_worker("a")
    job.add_worker("b")
    assert len(job.of(SchemaFixed)) == 1

    other = job.register("c")
    wide = ModelSchema(
        (SchemaEntry(name="weight", shape=(4,), element_type=ElementType.FLOAT32),)
    )
    with refused(ErrorReason.SCHEMA_MISMATCH):
        job.core.join(
            other,
            terms=JobTerms(schema=wide, optimizers=OPTIMIZERS),
            loaders=(),
            now_ms=0,
        )
    assert other.state is WorkerState.REGISTERED


def test_before_the_start_a_model_goes_with_the_last_who_stood_for_it() -> None:
    """Else a script that is corrected and started again would be refused for ever."""
    job = DrivenCoordinator(workers_min=2)
    wide = ModelSchema(
        (SchemaEntry(name="weight", shape=(4,), element_type=ElementType.FLOAT32),)
    )
    wrong = job.register("a")
    job.watch(wrong)
    job.core.join(
        wrong, terms=JobTerms(schema=wide, optimizers=OPTIMIZERS), loaders=(), now_ms=0
    )
    job.lose(wrong)

    job.add_worker("a", process_id="again")

    assert len(job.of(SchemaFixed)) == 2
    assert job.core.model.schema == SCHEMA


def test_a_declaration_is_kept_once_and_the_first_word_still_agrees() -> None:
    model = JobModel()
    model.agree(terms(schema("a", "b"), OPTIMIZERS))
    (group,) = sgd().groups
    grown = replace(sgd(), groups=(group, replace(group, entry_indexes=(1,))))

    assert not model.declare(with_rate(0.7)), "values are no part of it"
    assert model.declare(grown)
    assert not model.declare(grown)

    assert model.terms == terms(schema("a", "b"), (*OPTIMIZERS, grown))
    assert not model.agree(terms(schema("a", "b"), OPTIMIZERS))
    other = JobModel()
    other.restore(model.terms)
    assert other.terms == model.terms
    assert model.terms.first_optimizers == OPTIMIZERS
    assert declared_of(model) == (grown,)


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        ({"name": "x"}, ErrorReason.OPTIMIZER_MISMATCH, "not one of the job's"),
        ({"class_name": "LBFGS"}, ErrorReason.OPTIMIZER_UNSUPPORTED, "LBFGS"),
    ],
)
def test_a_declaration_that_is_none_is_refused(
    changes: dict[str, str], reason: ErrorReason, says: str
) -> None:
    model = JobModel()
    model.agree(terms(schema("a"), OPTIMIZERS))
    spec = replace(sgd(), exchange_count=1, **changes)  # type: ignore[arg-type]
    with refused(reason, says):
        model.declare(spec)
    assert model.terms == terms(schema("a"), OPTIMIZERS)


def test_a_later_declaration_keeps_the_word_of_the_loss() -> None:
    model = JobModel()
    summed = replace(sgd(), loss_is_sum=True)
    model.agree(terms(schema("a"), (summed,)))
    assert model.declare(replace(summed, exchange_count=1))
    for other in (sgd(), replace(sgd(), exchange_count=2)):
        with refused(ErrorReason.OPTIMIZER_MISMATCH, 'has loss="sum", this worker has'):
            model.declare(other)
    assert len(declared_of(model)) == 1


def test_a_declaration_counts_before_it_is_taken() -> None:
    """With it, and not only before it, there must be no more than a shard can hear."""
    model = JobModel()
    names = [str(index) for index in range(DECLARED_ENTRY_COUNT_MAX // 10)]
    model.agree(terms(schema(*names, shape=(1,)), OPTIMIZERS))
    (group,) = sgd().groups
    whole = replace(group, entry_indexes=tuple(range(len(names))))
    for exchange_count in range(1, 10):
        spec = replace(sgd(), groups=(whole,), exchange_count=exchange_count)
        assert model.declare(spec)

    with refused(ErrorReason.LIMIT_EXCEEDED, "500000 parameters in all"):
        model.declare(replace(sgd(), groups=(whole,), exchange_count=10))
    assert len(declared_of(model)) == 9
