"""The job's values in a worker that takes local steps: the anchor of its models.

A *twin* stands for each model in the job: bare modules with the same names, ties,
tensors and buffers. Its parameters hold the newest values of the job. What an inner
optimizer has is pushed and taken by a strategy; buffers, and parameters that no
optimizer has, are the same in both, as in a job without local steps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import escape

import torch
from torch import nn
from torch.optim import Optimizer

from pswire.schema import EntryKind
from psworker.errors import ConfigurationError
from psworker.optim.buffer_policies import BufferChoice, BufferPolicy, choose_policies
from psworker.optim.declared_tensors import (
    DeclaredTensors,
    refuse_shared_memory,
    warn_of_extra_state,
)
from psworker.optim.model_schema import bind_models
from psworker.optim.published import Published, published_entries
from psworker.strategies.strategy import FragmentOrder


@dataclass(frozen=True, slots=True)
class Fragment:
    """Parameters that are pushed together.

    Attributes:
        anchor: The twins' parameters: the job's values.
        local: The worker's own, in the same order.
        sent: What its own were when its push began, where that is of use.
    """

    anchor: list[torch.Tensor]
    local: list[torch.Tensor]
    sent: list[torch.Tensor] = field(default_factory=list)

    def keep_sent(self) -> None:
        """A push begins: keeps what the worker's own values are, for `with_trained`."""
        self.sent[:] = [each.detach().clone() for each in self.local]

    @contextmanager
    def with_trained(self) -> Iterator[None]:
        """Adds what local steps have changed since `keep_sent` to what is taken within.

        Where that raises all is as before: it is taken again. So it is until
        `forget_sent`, and has what was added once.
        """
        if not self.sent:
            yield
            return
        trained = torch._foreach_sub(self.local, self.sent)
        try:
            yield
            taken = [each.detach().clone() for each in self.local]
            torch._foreach_add_(self.local, trained)
            self.sent[:] = taken
        except BaseException:  # Ctrl-C too
            torch._foreach_copy_(self.local, torch._foreach_add(self.sent, trained))
            raise

    def forget_sent(self) -> None:
        """All is taken: what its own values were is of no more use."""
        self.sent.clear()

    def set_gradients(self, pushed: Sequence[torch.Tensor | None]) -> None:
        """Puts what a strategy pushes where the outer optimizer looks for it.

        Raises:
            ConfigurationError: That is not a tensor, or None, for each parameter;
                nothing was changed.
        """
        if not isinstance(pushed, Sequence) or len(pushed) != len(self.anchor):
            kind = type(pushed).__name__
            count = len(pushed) if isinstance(pushed, Sequence) else "no"
            raise ConfigurationError(
                f"push() of the strategy returned a {kind} of {count} tensors for "
                f"{len(self.anchor)} parameters: return a list of one for each in "
                "their order, or None for one that is left as it is"
            )
        for parameter, gradient in zip(self.anchor, pushed, strict=True):
            if gradient is not None and _kind_of(gradient) != _kind_of(parameter):
                raise ConfigurationError(
                    f"push() of the strategy returned {_kind_of(gradient)} for "
                    f"{_kind_of(parameter)}: return a tensor of its parameter's shape, "
                    "dtype and device"
                )
        for parameter, gradient in zip(self.anchor, pushed, strict=True):
            parameter.grad = gradient

    def clear_gradients(self) -> None:
        """Forgets what was pushed."""
        for parameter in self.anchor:
            parameter.grad = None


def _kind_of(value: object) -> str:
    """What a gradient must have of its parameter, in words."""
    if not isinstance(value, torch.Tensor):
        return repr(value)[:80]
    kind = str(value.dtype).removeprefix("torch.")
    return f"a {kind} tensor of shape {list(value.shape)} on {value.device}"


class Anchors:
    """The twins of a worker's models.

    Attributes:
        models: The twins, by `id()` of the user's model.
        policies: What becomes of buffers, by their entries.
        fragments: What inner optimizers have, in as many parts as asked for.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Iterable[Optimizer],
        *,
        fragment_count: int,
        fragment_order: FragmentOrder = "sequential",
        buffers: BufferChoice,
    ) -> None:
        """Makes twins with the models' values.

        Args:
            models: The user's, by name.
            optimizers: The inner ones.
            fragment_count: In how many parts parameters are pushed.
            fragment_order: Which of them are in one part.
            buffers: What becomes of buffers, as `prepare` takes it.

        Raises:
            ConfigurationError: A model can't be in a job, or an optimizer has a
                parameter of another one.
            UnsupportedError: A tensor can't be sent.
        """
        own = bind_models(models)
        self.policies = policies = choose_policies(own, buffers)
        refuse_shared_memory(own.schema.entries, own.tensors, policies)
        warn_of_extra_state(own.models)
        made: dict[int, nn.Module] = {}
        copies: dict[int, torch.Tensor] = {}
        twins = {
            name: _twin_of(each, made, copies) for name, each in own.models.items()
        }
        self.models = {id(models[name]): twin for name, twin in twins.items()}
        self._anchor = anchor = bind_models(twins).tensors
        self._entries = entries = own.schema.entries
        self._optimizers = tuple(optimizers)
        self._held = held = self._held_in(own.tensors)
        ordered = sorted(held)
        names = [f"{entries[i].model} {entries[i].name}" for i in ordered]
        sizes = [anchor[i].numel() for i in ordered]
        self.fragments = [
            Fragment(
                [anchor[ordered[place]] for place in part],
                [own.tensors[ordered[place]] for place in part],
            )
            for part in _parts(names, sizes, fragment_count, fragment_order)
        ]
        self._buffers = [
            index for index, each in policies.items() if each is not BufferPolicy.LOCAL
        ]
        frozen = set(range(len(anchor))).difference(held, policies)
        self._declared = DeclaredTensors(own, policies, frozen)
        self._versions: dict[int, int] = {}  # of frozen parameters, by index
        self._kept: dict[int, list[torch.Tensor]] = {}  # by fragment

    def buffer_choice(self, *, has_several: bool) -> dict[str, str]:
        """The policies by name, for twins have no batch norm that shows them.

        Args:
            has_several: Whether the job has several models, which are named then.
        """
        return {
            escape(f"{entry.model}.{entry.name}" if has_several else entry.name): each
            for entry, each in (
                (self._entries[index], policy.value)
                for index, policy in self.policies.items()
            )
        }

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of the worker's own."""
        return self._declared.tensors

    @property
    def devices(self) -> set[torch.device]:
        """Where the twins' tensors are."""
        return {each.device for part in self.fragments for each in part.anchor}

    def look(self) -> None:
        """Follows what the script has done to its tensors, such as another device.

        Raises:
            ConfigurationError: The job can't follow one.
        """
        for index in self._declared.look():
            own, anchor = self._declared.tensors[index], self._anchor[index]
            if own.device != anchor.device:
                anchor.data = anchor.data.to(own.device)
            self._versions.pop(index, None)

    def take_up(self) -> list[torch.Tensor]:
        """Takes parameters that optimizers have by now into the last fragment.

        Returns:
            The twins' of these.

        Raises:
            ConfigurationError: One belongs to no prepared model.
        """
        counts = (len(g["params"]) for o in self._optimizers for g in o.param_groups)
        if sum(counts) == len(self._held):
            return []
        new = sorted(self._held_in(self._declared.tensors) - self._held)
        self._held.update(new)
        self._declared.hold(new)
        last = self.fragments[-1]
        last.local.extend(self._declared.tensors[index] for index in new)
        last.anchor.extend(self._anchor[index] for index in new)
        return [self._anchor[index] for index in new]

    def _held_in(self, tensors: Sequence[torch.Tensor]) -> set[int]:
        """Entries of the parameters that optimizers have."""
        indexes = {id(tensor): index for index, tensor in enumerate(tensors)}
        return {
            index
            for index in _held_indexes(self._optimizers, indexes)
            if self._entries[index].kind is EntryKind.PARAMETER
        }

    def published(self, what: Sequence[Published]) -> list[torch.Tensor]:
        """The twins' tensors of what a script publishes, with the script's values.

        Raises:
            ConfigurationError: A tensor belongs to no prepared model.
        """
        self.look()
        own = self._declared.tensors
        indexes = published_entries(what, own)
        _copy((self._anchor[index], own[index]) for index in indexes)
        return [self._anchor[index] for index in indexes]

    def keep(self) -> None:
        """Keeps what the worker's own values began with, for `follow_job`."""
        for place, fragment in enumerate(self.fragments):
            if place not in self._kept:
                self._kept[place] = [each.detach().clone() for each in fragment.anchor]

    def forget(self, fragment: int) -> None:
        """The worker has taken a fragment: its values begin with the anchor's."""
        self._kept.pop(fragment, None)

    def follow_job(self) -> None:
        """Moves the worker's own values as the anchor has moved since `keep`.

        The difference between both, which was not pushed, stays what it is.
        """
        with torch.no_grad():
            for place, kept in self._kept.items():
                fragment = self.fragments[place]
                moved = torch._foreach_sub(fragment.anchor, kept)
                torch._foreach_add_(fragment.local, moved)
                fragment.forget_sent()
        self._kept.clear()
        self.take_followed()

    def send_followed(self) -> None:
        """Copies buffers, and parameters without an optimizer, into the twins.

        A forward pass may change a buffer and not count that. One that has become no
        number, as running statistics of values that are none, stays with the worker,
        which takes the job's after the push.
        """
        own = self._declared.tensors
        changed = [
            index
            for index in self._declared.frozen
            if self._versions.get(index) != own[index]._version
        ]
        buffers = [
            index
            for index in self._buffers
            if _is_finite(own[index]) or not _is_finite(self._anchor[index])
        ]
        _copy((self._anchor[index], own[index]) for index in (*buffers, *changed))
        self._note_versions()

    def take_followed(self) -> None:
        """Copies them back from the twins, which have the job's."""
        self.look()
        own = self._declared.tensors
        indexes = (*self._buffers, *self._declared.frozen)
        _copy((own[index], self._anchor[index]) for index in indexes)
        self._note_versions()

    @property
    def are_finite(self) -> bool:
        """Whether all that inner optimizers have is."""
        return all(_is_finite(each) for part in self.fragments for each in part.local)

    def give_up(self) -> None:
        """Makes all values those of the job, and forgets gradients of those before."""
        self.start_over()
        for fragment in self.fragments:
            for each in fragment.local:
                each.grad = None

    def start_over(self) -> None:
        """Makes all values of the worker those of the job."""
        self._kept.clear()
        with torch.no_grad():
            for fragment in self.fragments:
                fragment.clear_gradients()
                fragment.forget_sent()
                torch._foreach_copy_(fragment.local, fragment.anchor)
        self.take_followed()

    def _note_versions(self) -> None:
        own = self._declared.tensors
        self._versions = {each: own[each]._version for each in self._declared.frozen}


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second of each pair into the first."""
    with torch.no_grad():
        for into, source in pairs:
            into.copy_(source)


def _twin_of(
    module: nn.Module, made: dict[int, nn.Module], copies: dict[int, torch.Tensor]
) -> nn.Module:
    """A bare module with copies of a module's tensors, and of those within it.

    It has the name of the user's class, by which workers compare their models.
    """
    if id(module) in made:
        return made[id(module)]
    twin: nn.Module = type(type(module).__qualname__, (nn.Module,), {})()
    made[id(module)] = twin
    for name, parameter in module._parameters.items():
        twin.register_parameter(name, _copied(parameter, copies))  # type: ignore[arg-type]
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            twin.register_buffer(name, _copied(buffer, copies))
    for name, child in module._modules.items():
        twin.add_module(name, None if child is None else _twin_of(child, made, copies))
    return twin


def _copied(
    tensor: torch.Tensor | None, copies: dict[int, torch.Tensor]
) -> torch.Tensor | None:
    if tensor is None:
        return None
    if id(tensor) not in copies:
        copy = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
        copies[id(tensor)] = copy
    return copies[id(tensor)]


def _held_indexes(
    optimizers: Iterable[Optimizer], indexes: Mapping[int, int]
) -> Iterable[int]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                index = indexes.get(id(parameter))
                if index is None:
                    raise ConfigurationError(
                        f"a {type(optimizer).__name__} holds a parameter of shape "
                        f"{list(parameter.shape)} that belongs to no model given to "
                        "prepare(); pass every model that the optimizer updates, and "
                        "build the optimizer after the model was moved or replaced"
                    )
                yield index


def _parts(
    names: list[str], sizes: list[int], count: int, order: FragmentOrder
) -> list[list[int]]:
    """Places of parameters, in parts of about as many elements each."""
    # The parameters of a layer stay together where layers of a part do not.
    layers = {
        name.rpartition(".")[0] if order == "strided" else name: list[int]()
        for name in names
    }
    if count > len(layers):
        raise ConfigurationError(
            f"a model of {len(layers)} trained "
            f"{'layers' if order == 'strided' else 'parameters'} does not go into "
            f"{count} fragments: give fragment_count={max(1, len(layers))} or less"
        )
    if order == "sequential":
        return _neighbours(sizes, count)
    for place, name in enumerate(names):
        layers[name.rpartition(".")[0]].append(place)
    parts: list[list[int]] = [[] for _ in range(count)]
    for layer in layers.values():
        # An empty one first: a layer may have no elements.
        part = min(parts, key=lambda each: (bool(each), sum(sizes[i] for i in each)))
        part += layer
    return parts


def _neighbours(sizes: list[int], count: int) -> list[list[int]]:
    """Neighbours together."""
    parts: list[list[int]] = []
    left, left_size = list(enumerate(sizes)), sum(sizes)
    for rest in range(count, 0, -1):
        part: list[int] = []
        size = 0
        # At least one, and so many that each part to come has one.
        while (
            left
            and len(left) >= rest
            and (not part or rest == 1 or size + left[0][1] / 2 <= left_size / rest)
        ):
            place, each = left.pop(0)
            part.append(place)
            size += each
        left_size -= size
        parts.append(part)
    return parts
