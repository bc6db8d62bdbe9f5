"""Sorts what a user hands to `prepare`, and puts it in terms of the job."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pswire.compression import NO_COMPRESSION, Compression
from pswire.job_terms import JobTerms
from pswire.privacy import Privacy
from pswire.schema import EntryKind, ModelSchema, OptimizerSpec
from psworker.optim.adjusters import LossScales, parts
from psworker.optim.buffer_policies import BufferChoice, BufferPolicy, choose_policies
from psworker.optim.checks import check_clip_norm, check_loss, check_objects
from psworker.optim.declared_tensors import refuse_shared_memory, warn_of_extra_state
from psworker.optim.gradients import refuse_modules
from psworker.optim.model_schema import BoundSchema, bind_models, describe_optimizer
from psworker.optim.named_objects import NamedObjects
from psworker.optim.object_marks import mark_loaders, mark_models
from psworker.optim.optimizer import PreparedOptimizer
from psworker.optim.optimizer_state import States, states_of
from psworker.optim.privacy import (
    DifferentialPrivacy,
    check_private,
    refuse_unprotected,
)
from psworker.optim.user_calls import UserCalls
from psworker.tensors.compression import CompressionChoice, read_compression

KINDS: Final[Mapping[str, type[Any]]] = MappingProxyType(
    {"model": nn.Module, "optimizer": Optimizer, "loader": DataLoader}
)
"""Kinds of objects that have names in a job, by what the names begin with."""


class LocalTraining(Protocol):
    """Local steps of a script, between which the job's own objects are stepped.

    Attributes:
        models: What the script trains, in the place of what the job does.
        parameters: What its optimizers have of these.
        optimizers: These optimizers.
    """

    models: Sequence[nn.Module]
    parameters: Sequence[torch.Tensor]
    optimizers: Sequence[Optimizer]

    def start_over(self) -> None:
        """The worker has joined anew: its models begin with the job's values."""
        ...

    def end_round(self) -> None:
        """There is no more data for now: pushes what was trained and not pushed."""
        ...

    def contribute(self, push_nothing: Callable[[], None]) -> None:
        """The job waits for a push of this worker, which has no data.

        Args:
            push_nothing: Makes one of weight 0.
        """
        ...

    def before_draw(self) -> None:
        """The script asks for a batch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What `prepare` takes beside objects, as the script has passed it.

    Attributes:
        calls: Calls of the script, of which a step is one.
        local_training: What steps the job's objects, `None` for the script itself.
        strategy: How it does, in words by which workers are compared.
    """

    clip_grad_norm: float | None = None
    buffers: BufferChoice = None
    overlap: bool = False
    compression: CompressionChoice = None
    loss: str | None = None
    differential_privacy: DifferentialPrivacy | None = None
    calls: UserCalls = field(default_factory=UserCalls)
    local_training: LocalTraining | None = None
    strategy: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare` was given, by the names that things have in the job.

    Attributes:
        objects: As they were given.
        bound: The schema of all models, with their tensors.
        models: Models by name.
        optimizers: Optimizers by name.
        specs: How each optimizer is declared to shards.
        loaders: Loaders by name.
        schedulers: Learning rate schedulers.
        loss_scales: Of the gradient scalers.
        clip_grad_norm: Norm that gradients are clipped to, 0 for no clipping.
        states: State of optimizers that have any, as of a loaded checkpoint, by name.
        buffers: Policy of each buffer, by its entry in the schema.
        compression: How gradients and values are sent.
        held: Parameters that some optimizer has, by their entries.
        followed: Other parameters, whose values the leader sends when they change.
        privacy: What is promised about samples, `None` for nothing.
        strategy: How workers take local steps, in words; empty where they take none.
    """

    objects: NamedObjects
    bound: BoundSchema
    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    specs: dict[str, OptimizerSpec]
    loaders: dict[str, DataLoader[Any]]
    schedulers: tuple[LRScheduler, ...]
    states: dict[str, States]
    clip_grad_norm: float = 0.0
    buffers: dict[int, BufferPolicy] = field(default_factory=dict)
    loss_scales: LossScales = field(default_factory=LossScales)
    compression: Compression = NO_COMPRESSION
    held: frozenset[int] = frozenset()
    followed: frozenset[int] = frozenset()
    privacy: Privacy | None = None
    strategy: str = ""

    @property
    def terms(self) -> JobTerms:
        """What all workers of the job must agree on."""
        return JobTerms(
            schema=self.bound.schema,
            optimizers=tuple(self.specs.values()),
            clip_grad_norm=self.clip_grad_norm,
            compression=self.compression,
            privacy=self.privacy,
            strategy=self.strategy,
        )

    @property
    def loss(self) -> str:
        """What the loss is over its batch, `mean` or `sum`."""
        is_sum = any(spec.loss_is_sum for spec in self.specs.values())
        return "sum" if is_sum else "mean"

    def in_order(self, order: Sequence[int]) -> Self:
        """The same with the tensors in the order of the job.

        `order` has the position there of each tensor here.
        """
        positions = dict(enumerate(order))
        sources = sorted(positions, key=positions.__getitem__)
        schema = self.bound.schema
        bound = replace(
            self.bound,
            schema=ModelSchema(
                tuple(schema.entries[source] for source in sources), schema.marks
            ),
            tensors=tuple(self.bound.tensors[source] for source in sources),
        )
        return replace(
            self,
            bound=bound,
            specs={
                name: replace(
                    spec,
                    groups=tuple(
                        replace(
                            group,
                            entry_indexes=tuple(
                                positions[index] for index in group.entry_indexes
                            ),
                        )
                        for group in spec.groups
                    ),
                )
                for name, spec in self.specs.items()
            },
            states={
                name: {positions[index]: each for index, each in states.items()}
                for name, states in self.states.items()
            },
            buffers={positions[index]: each for index, each in self.buffers.items()},
            held=frozenset(positions[index] for index in self.held),
            followed=frozenset(positions[index] for index in self.followed),
        )


def sort_objects(
    objects: NamedObjects | Sequence[Any],
    options: PrepareOptions | None = None,
) -> Prepared:
    """Names and describes what `prepare` was given.

    Raises:
        ConfigurationError: Something is missing, or of a kind that is not taken.
        OptimizerUnsupportedError: Shards can't run an optimizer.
        UnsupportedError: A tensor can't be sent.
    """
    options = options or PrepareOptions()
    if not isinstance(objects, NamedObjects):
        objects = NamedObjects.of(objects, {})
    check_objects(objects)
    check_clip_norm(options.clip_grad_norm)
    check_loss(options.loss)
    given = objects.objects
    scalers = (each for each in given if isinstance(each, GradScaler))
    chosen = read_compression(options.compression)
    models, optimizers, loaders = (
        objects.of_kind(base, kind) for base, kind in KINDS.items()
    )
    bound = _marked(bind_models(models), models, loaders, objects)
    indexes = bound.index_of_tensors()
    states = {name: states_of(each, indexes) for name, each in optimizers.items()}
    specs = {
        name: describe_optimizer(
            name, optimizer, bound, loss_is_sum=options.loss == "sum"
        )
        for name, optimizer in optimizers.items()
    }
    refuse_modules(models, bound.tensors, specs)
    held = frozenset(index for spec in specs.values() for index in spec.entry_indexes)
    private = options.differential_privacy
    if private is not None:
        check_private(private)
        refuse_unprotected(
            given,
            models,
            loaders,
            optimizer_count=len(optimizers),
            buffers=options.buffers,
            overlap=options.overlap,
        )
    policies = choose_policies(bound, options.buffers if private is None else "local")
    refuse_shared_memory(bound.schema.entries, bound.tensors, policies)
    warn_of_extra_state(bound.models)
    return Prepared(
        objects=objects,
        bound=bound,
        models=models,
        optimizers=optimizers,
        specs=specs,
        loaders=loaders,
        schedulers=tuple(each for each in given if isinstance(each, LRScheduler)),
        clip_grad_norm=float(options.clip_grad_norm or 0.0),
        states={name: state for name, state in states.items() if state},
        buffers=policies,
        loss_scales=LossScales(scalers),
        compression=chosen,
        held=held,
        followed=_followed(bound.schema, held, chosen, private),
        privacy=None if private is None else private.terms(),
        strategy=options.strategy,
    )


def _followed(
    schema: ModelSchema,
    held: Collection[int],
    compression: Compression,
    private: DifferentialPrivacy | None,
) -> frozenset[int]:
    """Parameters that no optimizer has: a script may move them by itself.

    Not in a job that sends fewer bytes: what came back would be rounded each time. Nor
    in one with differential privacy: they would go without noise.
    """
    if compression != NO_COMPRESSION or private is not None:
        return frozenset()
    return frozenset(
        index
        for index, entry in enumerate(schema.entries)
        if entry.kind is EntryKind.PARAMETER and index not in held
    )


def point_schedulers(
    schedulers: Sequence[LRScheduler], replaced: dict[int, PreparedOptimizer]
) -> None:
    """Has schedulers that were built before `prepare` work on what it returns.

    `replaced` has the prepared optimizers by `id()` of the user's.
    """
    for given in schedulers:
        for scheduler in parts(given):
            optimizer = replaced.get(id(getattr(scheduler, "optimizer", None)))
            if optimizer is not None:
                scheduler.optimizer = optimizer


def _marked(
    bound: BoundSchema,
    models: Mapping[str, nn.Module],
    loaders: Mapping[str, DataLoader[Any]],
    objects: NamedObjects,
) -> BoundSchema:
    """The same with marks by which workers compare their models and loaders."""
    named = objects.by_name
    marks = mark_models(models, named) + mark_loaders(loaders, named)
    return replace(bound, schema=replace(bound.schema, marks=marks))
