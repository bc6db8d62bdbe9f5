"""What `prepare` makes for a job, and for one that replaces optimizers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pswire.schema import OptimizerSpec
from psworker.data import DataSource, LoaderRefused, prepare_loader
from psworker.errors import ConfigurationError
from psworker.member.script_state import Rewind
from psworker.optim.adjusters import LossScales
from psworker.optim.buffer_policies import BufferChoice, BufferPolicy, choose_policies
from psworker.optim.checks import check_loss, check_same_clip_norm, kinds_text
from psworker.optim.model_schema import describe_optimizer
from psworker.optim.named_objects import NamedObjects
from psworker.optim.optimizer import PreparedOptimizer
from psworker.optim.optimizer_state import states_of
from psworker.optim.prepare import Prepared, PrepareOptions, point_schedulers
from psworker.optim.privacy import check_private
from psworker.optim.wrappers import without_wrappers
from psworker.tensors.compression import CompressionChoice, read_compression

Make = Callable[[Optimizer, OptimizerSpec], PreparedOptimizer]
"""Makes the optimizer that steps on the shards in place of the user's."""


def leased(
    loaders: Mapping[str, DataLoader[Any]], source: DataSource
) -> dict[int, Any]:
    """The prepared loader of each of the user's, by `id()` of that.

    Raises:
        ConfigurationError: The job can't share out the data of one.
    """
    made = {}
    for name, loader in loaders.items():
        try:
            made[id(loader)] = prepare_loader(loader, source, name=name)
        except LoaderRefused as refused:
            raise ConfigurationError(f"{name}: {refused}") from None
    return made


class PreparedObjects:
    """Optimizers and loaders that work on a job.

    Attributes:
        given: Of the first call of `prepare`, in the job's order.
        optimizers: By their names in the job, as prepared last.
        loaders: By `id()` of the user's.
    """

    def __init__(self, given: Prepared, loaders: Mapping[int, Any], make: Make) -> None:
        self.given = given
        self.loaders = dict(loaders)
        self._make = make
        self.optimizers = {
            name: make(optimizer, given.specs[name])
            for name, optimizer in given.optimizers.items()
        }
        for each in self.optimizers.values():
            each.loss_scales = given.loss_scales
        given.states.clear()  # the shards have it
        point_schedulers(given.schedulers, self._by_id(given.optimizers))

    def follow_schedulers(
        self,
        *,
        is_late: bool,
        new_epoch: int = 0,
        local: Sequence[Optimizer] = (),
    ) -> dict[int, Any]:
        """Sends the schedulers' steps with every push; returns all replacements.

        Args:
            is_late: Whether the job has trained already: they catch up with its.
            new_epoch: The one that the job comes to next; 0 if it is in the middle of
                one.
            local: Optimizers that step between the pushes of the job's: schedulers are
                theirs, and their steps go with the first of the job's.
        """
        schedulers = self.given.schedulers
        for each in self.optimizers.values():
            each.follow(schedulers, is_late=is_late, new_epoch=new_epoch, local=local)
            if local:
                break
        return self.loaders | self._by_id(self.given.optimizers)

    def rewind(self, rewind: Rewind) -> Iterator[str]:
        """Sets optimizers back to a checkpoint; what of them stays, in words."""
        for each in self.optimizers.values():
            each.rewind(is_late=rewind.to_clock > 0)
            if each.schedules.follows_metric:
                yield f"what ReduceLROnPlateau of {each.name} has measured"
        if BufferPolicy.LOCAL in self.given.buffers.values():
            yield "buffers that are local to each worker"
        sent = self.given.compression.push_encoding
        if sent is not None and sent.keeps_residual:
            yield f"residuals of {sent.name}"

    def exchange(
        self,
        call: NamedObjects,
        options: PrepareOptions,
        declare: Callable[[OptimizerSpec], None],
    ) -> dict[int, Any]:
        """Replaces optimizers of the last call; returns the replacements by `id()`.

        Args:
            call: Objects of this call of `prepare`.
            options: Of this call.
            declare: Declares an optimizer to the shards.

        Raises:
            ConfigurationError: They do not fit the first call.
        """
        given = self.given
        _refuse_other_choices(given, options.buffers, options.compression)
        check_loss(options.loss, given.loss)
        check_same_clip_norm(options.clip_grad_norm, given.clip_grad_norm or None)
        if options.differential_privacy is not None and given.privacy is None:
            raise ConfigurationError(
                "the job promises nothing about its samples, since the first prepare() "
                "had no differential_privacy: give it there"
            )
        check_private(options.differential_privacy, given.privacy)
        again = self._sort(call)
        specs = {
            name: describe_optimizer(
                name,
                optimizer,
                given.bound,
                exchange_count=self.optimizers[name].spec.exchange_count + 1,
                loss_is_sum=self.optimizers[name].spec.loss_is_sum,
            )
            for name, optimizer in again.optimizers.items()
        }
        for spec in specs.values():
            declare(spec)
        for name, optimizer in again.optimizers.items():
            states = states_of(optimizer, given.bound.index_of_tensors())
            made = self._make(optimizer, specs[name])
            made.take_place_of(self.optimizers[name], states)
            made.loss_scales = again.loss_scales or given.loss_scales
            self.optimizers[name] = made
        replaced = self._by_id(again.optimizers)
        point_schedulers(again.schedulers, replaced)
        for name in again.optimizers:
            self.optimizers[name].follow(again.schedulers, is_late=False)
        return again.loaders | replaced

    def _by_id(self, inner: Mapping[str, Optimizer]) -> dict[int, PreparedOptimizer]:
        return {id(each): self.optimizers[name] for name, each in inner.items()}

    def _sort(self, call: NamedObjects) -> "_Again":
        """Finds what each object is in the job."""
        objects = call.objects
        found = _Again(
            schedulers=tuple(each for each in objects if isinstance(each, LRScheduler)),
            loss_scales=LossScales(
                each for each in objects if isinstance(each, GradScaler)
            ),
        )
        models = [without_wrappers(each) for each in self.given.models.values()]
        prepared = list(self.loaders.values())
        for each, name in zip(objects, call.names, strict=True):
            if isinstance(each, nn.Module):
                if not any(without_wrappers(each) is model for model in models):
                    raise ConfigurationError(
                        "prepare() again takes the models of the first call only: the "
                        "job's shards hold those; connect to another job for another "
                        "model"
                    )
            elif id(each) in self.loaders or any(each is known for known in prepared):
                found.loaders[id(each)] = self.loaders.get(id(each), each)
            elif isinstance(each, DataLoader):
                raise ConfigurationError(
                    "prepare() again takes the loaders of the first call only: leave "
                    "loaders out, and go on with those that it has returned"
                )
            elif not isinstance(each, Optimizer | LRScheduler | GradScaler):
                raise ConfigurationError(kinds_text(each, name))
        _match(call, self.optimizers, found)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """What changes when `prepare` is called again.

    Attributes:
        optimizers: New ones by the name of the one that each replaces.
        loaders: Prepared ones by `id()` of that in the call.
    """

    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    loaders: dict[int, Any] = field(default_factory=dict)
    schedulers: tuple[LRScheduler, ...]
    loss_scales: LossScales


def _refuse_other_choices(
    given: Prepared, buffers: BufferChoice, compression: CompressionChoice
) -> None:
    """Checks that a second call names no other policies of buffers or compression."""
    if buffers is not None and choose_policies(given.bound, buffers) != given.buffers:
        raise ConfigurationError(
            "buffers keep the policies of the first prepare(); leave buffers out, or "
            "give the same, when prepare() is called again"
        )
    if compression is not None and (
        str(read_compression(compression)) != str(given.compression)
    ):
        raise ConfigurationError(
            f"the job sends as the first prepare() said, "
            f"{str(given.compression) or 'without compression'}; leave compression "
            "out, or give the same, when prepare() is called again"
        )


def _match(
    call: NamedObjects,
    optimizers: Mapping[str, PreparedOptimizer],
    found: _Again,
) -> None:
    """Matches optimizers by name; those without one by their order in the job."""
    named = {
        name: each for name, each in call.by_name.items() if isinstance(each, Optimizer)
    }
    unknown = [name for name in named if name not in optimizers]
    if unknown:
        raise ConfigurationError(
            f"prepare() again takes the names of the first call: {unknown[0]!r} is "
            f"none of the job's optimizers, which are {', '.join(optimizers)}"
        )
    unnamed = [each for each in call.positional if isinstance(each, Optimizer)]
    left = [name for name in optimizers if name not in named]
    given = [*named.values(), *unnamed]
    # With names those that stay may be left out.
    is_short = len(unnamed) != len(left) and not (named and not unnamed)
    if is_short or len({id(each) for each in given}) < len(given):
        raise ConfigurationError(
            f"prepare() again takes as many optimizers as the job has, which are "
            f"{', '.join(optimizers)}, in the order of the first call: a new one where "
            "one is exchanged, and the prepared one where not; or those that are "
            f"exchanged by name, as in {next(iter(optimizers))}=..."
        )
    pairs = [*named.items(), *zip(left, unnamed, strict=False)]
    for name, each in pairs:
        known = optimizers[name]
        if each is known:
            continue
        if isinstance(each, PreparedOptimizer) or any(
            other.is_of(each) for other in optimizers.values()
        ):
            raise ConfigurationError(
                f"{name} can't be exchanged for an optimizer that was prepared "
                "already; build a new one, or give the one that prepare() returned, "
                "at its place"
            )
        found.optimizers[name] = each
