"""What a job trains: the first worker decides, every later one must agree."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

from pswire.clipping import is_clip_norm
from pswire.compression import Compression
from pswire.job_terms import JobTerms
from pswire.names import printable
from pswire.object_marks import LOADER, MODEL, doubts, exchanged, order_difference
from pswire.optimizers import check_supported, check_values
from pswire.privacy import Privacy
from pswire.reasons import ErrorReason, Refusal
from pswire.schema import ModelSchema, OptimizerSpec

DECLARATION_COUNT_MAX = 256
"""Most declarations of optimizers after the first ones. Each stays, for workers that
come late; a script that needs more makes one with every few steps."""

DECLARED_ENTRY_COUNT_MAX = 500_000
"""Parameters in all declarations: with more no shard could receive them, whose
watch begins with one message that holds all."""

DIFFERENCE_LINES_MAX = 40
"""Lines of a difference that a person will read."""

STRATEGY_LENGTH_MAX = 160
"""Characters of a strategy in a status: it has one line there."""


class JobModel:
    """The terms of a job.

    Attributes:
        terms: None until the first worker has asked to join.
    """

    def __init__(self, terms: JobTerms | None = None) -> None:
        self.terms = terms

    @property
    def schema(self) -> ModelSchema | None:
        return self.terms.schema if self.terms is not None else None

    @property
    def clip_grad_norm(self) -> float:
        """Global norm that gradients are clipped to, 0 for no clipping."""
        return self.terms.clip_grad_norm if self.terms is not None else 0.0

    @property
    def strategy_text(self) -> str:
        """How workers take local steps, for people; empty where they take none."""
        if self.terms is None or not self.terms.strategy:
            return ""
        name = self.terms.strategy.removesuffix("()")
        if len(name) > STRATEGY_LENGTH_MAX:
            name = f"{name[:STRATEGY_LENGTH_MAX]}..."
        # Each fragment of the model has one, of its own parameters.
        outer = {_optimizer_text(each): None for each in self.terms.first_optimizers}
        return ", outer ".join([name, *list(outer)[:1]])

    def agree(self, theirs: JobTerms, *, is_alone: bool = False) -> bool:
        """Takes the first worker's terms, and holds every later one to them.

        Args:
            theirs: The worker's terms.
            is_alone: Whether no other worker is there. Then outer optimizers may have
                other numbers than before, as when a job goes on from a checkpoint.

        Returns:
            Whether the terms have changed.

        Raises:
            Refusal: `SCHEMA_MISMATCH` or `OPTIMIZER_MISMATCH` with a readable
                difference, `HYPERPARAMETER_INVALID`, or what makes a first one
                useless; no state changed.
        """
        job, schema = self.terms, theirs.schema
        if job is None:
            schema.validate()
            _check_runnable(schema, theirs.optimizers)
            _check_clip(theirs.clip_grad_norm)
            self.terms = theirs
            return True
        if theirs.strategy != job.strategy:  # first: all else follows from it
            raise _otherwise(
                _strategy_text(job.strategy), _strategy_text(theirs.strategy)
            )
        self._refuse_other_order(schema)
        order = job.schema.order_of(schema)
        if order is None:
            lines = job.schema.differences(schema)
            raise Refusal(
                ErrorReason.SCHEMA_MISMATCH,
                _listed("this worker's model differs from the job's", lines),
            )
        optimizers = [_in_order(each, order) for each in theirs.optimizers]
        self._compare_optimizers(optimizers)
        if theirs.clip_grad_norm != job.clip_grad_norm:
            raise _otherwise(
                _clip_text(job.clip_grad_norm), _clip_text(theirs.clip_grad_norm)
            )
        promised = theirs.privacy
        if not (promised.agrees_with(job.privacy) if promised else not job.privacy):
            raise _otherwise(_privacy_text(job.privacy), _privacy_text(theirs.privacy))
        if str(theirs.compression) != str(job.compression):
            raise _otherwise(
                _compression_text(job.compression),
                _compression_text(theirs.compression),
            )
        return bool(job.strategy) and self._agree_on_values(optimizers, is_alone)

    def order_of(self, schema: ModelSchema) -> tuple[int, ...]:
        """Position in the job of each tensor of a worker that agrees.

        Empty where it has the job's order anyway.
        """
        order = self.schema.order_of(schema) if self.schema is not None else None
        if order is None or order == tuple(range(len(order))):
            return ()
        return order

    def doubts(self, schema: ModelSchema) -> list[str]:
        """What the log of a worker that agrees should say, a line each."""
        return doubts(self.schema.marks, schema.marks) if self.schema else []

    def copy(self) -> "JobModel":
        """The same word, which does not change with this one."""
        return copy(self)

    def restore(self, terms: JobTerms) -> None:
        """Goes on with what was kept.

        Raises:
            Refusal: What was kept is no longer possible; no state changed.
        """
        first = JobModel()
        first.agree(replace(terms, optimizers=terms.first_optimizers))
        self.terms = terms

    def declare(self, spec: OptimizerSpec) -> bool:
        """Takes a later declaration of an optimizer.

        Returns:
            Whether it is new.

        Raises:
            Refusal: `OPTIMIZER_MISMATCH`, `LIMIT_EXCEEDED`, or what makes it useless;
                no state changed.
        """
        job = self.terms
        first = {each.name: each for each in job.first_optimizers} if job else {}
        if job is None or spec.name not in first:
            raise Refusal(
                ErrorReason.OPTIMIZER_MISMATCH,
                f"{spec.name[:64]!r} is not one of the job's optimizers {list(first)}",
            )
        _check_loss(first[spec.name], spec)
        if (spec.name, spec.digest) in {(o.name, o.digest) for o in job.optimizers}:
            return False
        _check_runnable(job.schema, (spec,))
        entry_count = sum(
            len(group.entry_indexes)
            for each in (*job.optimizers, spec)
            for group in each.groups
        )
        declared_count = len(job.declared)
        if (
            declared_count >= DECLARATION_COUNT_MAX
            or entry_count > DECLARED_ENTRY_COUNT_MAX
        ):
            raise Refusal(
                ErrorReason.LIMIT_EXCEEDED,
                f"the groups of the job's optimizers were changed {declared_count} "
                f"times, the limit is {DECLARATION_COUNT_MAX} times, or "
                f"{DECLARED_ENTRY_COUNT_MAX} parameters in all",
                cure="give the optimizer its groups at once, with lr=0 until they "
                "shall train",
            )
        self.terms = replace(job, optimizers=(*job.optimizers, spec))
        return True

    @property
    def byte_count(self) -> int:
        return self.terms.byte_count if self.terms is not None else 0

    def _refuse_other_order(self, schema: ModelSchema) -> None:
        """Refuses models or loaders that come in another order than the job's.

        Raises:
            Refusal: `SCHEMA_MISMATCH` or `DATA_ORDER_MISMATCH`, with both orders.
        """
        assert self.schema is not None, "compared with a job's"
        for kind, reason in (
            (MODEL, ErrorReason.SCHEMA_MISMATCH),
            (LOADER, ErrorReason.DATA_ORDER_MISMATCH),
        ):
            lines = order_difference(self.schema.marks, schema.marks, kind)
            if lines:
                what = f"this worker's {kind}s come in another order than the job's"
                raise Refusal(reason, _listed(what, [*lines, _ORDER_ADVICE]))

    def _compare_optimizers(self, optimizers: Sequence[OptimizerSpec]) -> None:
        """Compares what a worker has, in terms of the job's tensors."""
        assert self.terms is not None, "compared with a job's"
        mine = {each.name: each for each in self.terms.first_optimizers}
        theirs = {each.name: each for each in optimizers}
        if sorted(mine) != sorted(theirs) or len(theirs) != len(optimizers):
            raise Refusal(
                ErrorReason.OPTIMIZER_MISMATCH,
                f"the job has optimizers {list(mine)}, this worker has "
                f"{[each.name for each in optimizers]}",
            )
        self._refuse_exchanged(mine, theirs)
        for name, job in mine.items():
            worker = theirs[name]
            if job.class_name != worker.class_name:
                raise Refusal(
                    ErrorReason.OPTIMIZER_MISMATCH,
                    f"optimizer {name!r} is {job.class_name} in the job, "
                    f"{worker.class_name} here",
                )
            _check_loss(job, worker)
            if job.hyperparameter_names != worker.hyperparameter_names:
                raise Refusal(
                    ErrorReason.OPTIMIZER_MISMATCH,
                    f"optimizer {name!r} has hyperparameters "
                    f"{list(job.hyperparameter_names)} in the job, "
                    f"{list(worker.hyperparameter_names)} here: the torch versions "
                    "differ",
                )
            if _groups_of(job) != _groups_of(worker):
                raise Refusal(
                    ErrorReason.OPTIMIZER_MISMATCH,
                    f"optimizer {name!r} groups the parameters otherwise: "
                    f"{[len(g) for g in _groups_of(job)]} parameters in its groups in "
                    f"the job, {[len(g) for g in _groups_of(worker)]} here"
                    f"{self._first_other(job, worker)}",
                )

    def _agree_on_values(
        self, optimizers: Sequence[OptimizerSpec], is_alone: bool
    ) -> bool:
        """Compares the numbers of outer optimizers, or takes them of one alone.

        Those of a script's own optimizers go with each push, as its schedulers have
        changed them. Outer ones are of the strategy, which is one in all workers.
        """
        assert self.terms is not None, "compared with a job's"
        kept = {each.name: each for each in self.terms.first_optimizers}
        taken: dict[int, OptimizerSpec] = {}
        for worker in optimizers:
            job = kept[worker.name]
            pairs = list(zip(job.groups, worker.groups, strict=True))
            if all(mine.hyperparameters == own.hyperparameters for mine, own in pairs):
                continue
            if not is_alone:
                raise _otherwise(_values_text(job, worker), _values_text(worker, job))
            for mine, own in pairs:
                check_values(
                    job.class_name,
                    job.hyperparameter_names,
                    own.hyperparameters,
                    declared=mine.hyperparameters,
                )
            groups = (
                replace(mine, hyperparameters=own.hyperparameters)
                for mine, own in pairs
            )
            taken[id(job)] = replace(job, groups=tuple(groups))
        if taken:
            specs = (taken.get(id(each), each) for each in self.terms.optimizers)
            self.terms = replace(self.terms, optimizers=tuple(specs))
        return bool(taken)

    def _refuse_exchanged(
        self, mine: dict[str, OptimizerSpec], theirs: dict[str, OptimizerSpec]
    ) -> None:
        """Refuses optimizers that come in another order than the job's.

        Raises:
            Refusal: `OPTIMIZER_MISMATCH`, with both orders.
        """
        likenesses: tuple[Callable[[OptimizerSpec], object], ...] = (
            lambda spec: (spec.class_name, _groups_of(spec)),
            # Two over the same parameters: of what they began with.
            lambda spec: (_groups_of(spec), [g.hyperparameters for g in spec.groups]),
        )
        for likeness in likenesses:
            job, worker = (
                {name: repr(likeness(spec)) for name, spec in specs.items()}
                for specs in (mine, theirs)
            )
            moved = exchanged(job, worker)
            if moved:
                lines = [
                    f"! {name}: {self._held(mine[name])} in the job, "
                    f"{self._held(theirs[name])} here, which is {target} in the job"
                    for name, target in moved.items()
                ]
                what = "this worker's optimizers come in another order than the job's"
                raise Refusal(
                    ErrorReason.OPTIMIZER_MISMATCH,
                    _listed(what, [*lines, _ORDER_ADVICE]),
                )

    def _held(self, spec: OptimizerSpec) -> str:
        """An optimizer, for people: its class, rates and what it updates."""
        assert self.schema is not None, "compared with a job's"
        entries = [
            self.schema.entries[index]
            for group in spec.groups
            for index in group.entry_indexes
        ]
        if not entries:
            return f"{spec.class_name} over nothing"
        rates = ", ".join(f"{group.hyperparameters[0]:g}" for group in spec.groups)
        first = f"{entries[0].model}.{entries[0].name}"
        more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
        return f"{spec.class_name} (lr={rates}) over {first}{more}"

    def _first_other(self, job: OptimizerSpec, worker: OptimizerSpec) -> str:
        """The first tensor that only one of two has in a group, in words."""
        assert self.schema is not None, "compared with a job's"
        pairs = zip(_groups_of(job), _groups_of(worker), strict=False)
        for position, (mine, theirs) in enumerate(pairs):
            for index in sorted(set(mine) ^ set(theirs)):
                entry = self.schema.entries[index]
                where = "in the job" if index in mine else "here"
                return (
                    f"; only {where} {entry.model}.{entry.name} is in group {position}"
                )
        return ""


_ORDER_ADVICE = (
    "give prepare() the same order on all workers, or name what belongs together, as "
    "in ps.prepare(generator=G, discriminator=D, opt_g=og, opt_d=od)"
)


def _listed(what: str, lines: list[str]) -> str:
    """What differs, with its lines, as many as a person will read."""
    shown = lines[:DIFFERENCE_LINES_MAX]
    if len(lines) > len(shown):
        shown.append(f"... and {len(lines) - len(shown)} more")
    return f"{what}:\n  " + "\n  ".join(shown)


def _in_order(spec: OptimizerSpec, order: tuple[int, ...]) -> OptimizerSpec:
    """An optimizer of a worker in terms of the job's tensors."""
    groups = (
        replace(group, entry_indexes=tuple(order[i] for i in group.entry_indexes))
        for group in spec.groups
    )
    return replace(spec, groups=tuple(groups))


def _groups_of(spec: OptimizerSpec) -> list[list[int]]:
    """Parameters of each group, in one order whatever the worker's was."""
    return [sorted(group.entry_indexes) for group in spec.groups]


def _otherwise(job: str, worker: str) -> Refusal:
    """Of an option of `prepare` that a worker has and the job has otherwise."""
    return Refusal(
        ErrorReason.OPTIMIZER_MISMATCH,
        f"the job has {job}, this worker has {worker}",
        cure="give all workers' prepare() the same",
    )


def _check_loss(job: OptimizerSpec, worker: OptimizerSpec) -> None:
    """Refuses a worker whose loss is of another kind than the job's.

    Raises:
        Refusal: `OPTIMIZER_MISMATCH`.
    """
    if job.loss_is_sum != worker.loss_is_sum:
        raise _otherwise(_loss_text(job), _loss_text(worker))


def _loss_text(spec: OptimizerSpec) -> str:
    return 'loss="sum"' if spec.loss_is_sum else 'loss="mean"'


def _clip_text(clip_grad_norm: float) -> str:
    if not clip_grad_norm:
        return "no clip_grad_norm"
    return f"clip_grad_norm={clip_grad_norm:g}"


def _compression_text(compression: Compression) -> str:
    return f"compression ({compression})" if str(compression) else "no compression"


def _strategy_text(strategy: str) -> str:
    return f"strategy={printable(strategy)}" if strategy else "no strategy"


def _optimizer_text(spec: OptimizerSpec) -> str:
    """An optimizer with its first group's numbers that are not 0."""
    numbers = zip(
        spec.hyperparameter_names, spec.groups[0].hyperparameters, strict=True
    )
    values = ", ".join(f"{name}={value:g}" for name, value in numbers if value)
    return f"{spec.class_name}({values})"


def _values_text(spec: OptimizerSpec, other: OptimizerSpec) -> str:
    """What an outer optimizer has otherwise than another one of its class."""
    pairs = zip(spec.groups, other.groups, strict=True)
    values = {
        f"{name}={str(value).removesuffix('.0')}": None  # once for several groups
        for mine, theirs in pairs
        for name, value, unlike in zip(
            spec.hyperparameter_names,
            mine.hyperparameters,
            theirs.hyperparameters,
            strict=True,
        )
        if value != unlike
    }
    return f"the outer optimizer {spec.class_name}({', '.join(values)})"


def _privacy_text(privacy: Privacy | None) -> str:
    if privacy is None:
        return "no differential_privacy"
    return f"differential_privacy ({privacy})"


def _check_clip(clip_grad_norm: float) -> None:
    """Refuses what is no norm.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    if clip_grad_norm != 0 and not is_clip_norm(clip_grad_norm):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"clip_grad_norm={clip_grad_norm:g} is no norm to clip to: it must be "
            "finite and more than 0",
        )


def _check_runnable(schema: ModelSchema, optimizers: tuple[OptimizerSpec, ...]) -> None:
    """Refuses what no shard could run: it would end every shard of the job.

    Raises:
        Refusal: `OPTIMIZER_UNSUPPORTED`, `HYPERPARAMETER_INVALID` or
            `MALFORMED_MESSAGE`.
    """
    names = [spec.name for spec in optimizers]
    if not names or len(set(names)) != len(names):
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"a job has optimizers of different names, these are {names[:8]}",
        )
    for spec in optimizers:
        check_supported(spec.class_name)
        for group in spec.groups:
            check_values(
                spec.class_name, spec.hyperparameter_names, group.hyperparameters
            )
            for entry in (schema.entries[index] for index in group.entry_indexes):
                if not entry.element_type.is_floating:
                    raise Refusal(
                        ErrorReason.MALFORMED_MESSAGE,
                        f"{spec.name[:64]!r} updates {entry.name[:64]!r}, which is "
                        f"{entry.described}",
                    )
