"""What the tensors of a worker's models were at `prepare`, and what they are now.

In the user's thread only, with one cheap look before each step: at what the modules
hold, and at memory, type and shape of each tensor. No value is read. Another memory,
device or layout is followed; what the job can't follow is refused by name, before
anything is sent.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from pswire.schema import EntryKind, SchemaEntry
from pswire.torch_types import TORCH_DTYPES
from psworker.errors import ConfigurationError
from psworker.optim.buffer_policies import BufferPolicy
from psworker.optim.memory_ranges import overlapping_pairs, overlaps_itself
from psworker.optim.model_schema import BoundSchema, persistent_buffers

logger: Final = logging.getLogger("psworker")

_KINDS: Final = ("_parameters", "_buffers")
_EXTRA_STATE: Final = "_extra_state"
_SHOWN_COUNT: Final = 4


class _Slot(NamedTuple):
    """Where a module keeps a tensor: a script may put another one there."""

    module: nn.Module
    kind: str
    key: str

    @property
    def tensor(self) -> torch.Tensor | None:
        """What is there now."""
        held = getattr(self.module, self.kind)
        if isinstance(held, dict):
            found: torch.Tensor | None = held.get(self.key)
            return found
        return dict(held.items()).get(self.key)  # of a scripted module


class _Known(NamedTuple):
    """A tensor as it was at the last look, and what shows without reading it."""

    tensor: torch.Tensor
    look: tuple[object, ...]


class DeclaredTensors:
    """The tensors of one worker's models, as the job knows them.

    Attributes:
        tensors: The tensor of each entry of the schema, as of the last look.
        frozen: Parameters that no optimizer has. One that is exchanged is followed; one
            that can't be is followed no more, with a warning.
    """

    def __init__(
        self,
        bound: BoundSchema,
        policies: Mapping[int, BufferPolicy],
        frozen: Collection[int] = (),
    ) -> None:
        """Takes the models as they are; `policies` are those of all buffers."""
        self.frozen = set(frozen)
        self.tensors = list(bound.tensors)
        self._entries = bound.schema.entries
        self._models = bound.models
        self._policies = policies
        watched = [
            index
            for index in range(len(self._entries))
            if policies.get(index) is not BufferPolicy.LOCAL
        ]
        slots = _slots_of(bound.models.values())
        # The structure of modules shows whether a parameter was exchanged.
        self._slots = {
            index: slots.get(id(self.tensors[index]), [])
            for index in watched
            if index in policies or index in self.frozen
        }
        self._known = {
            index: _Known(self.tensors[index], _look_of(self.tensors[index]))
            for index in watched
        }
        self._note_structure()

    def look(self) -> list[int]:
        """Compares what there is with what there was at the last look.

        Returns:
            Entries that have another tensor, or whose tensor has other memory, another
            device or other strides.

        Raises:
            ConfigurationError: The job can't follow what has changed. Nothing is
                noted, so that the next look says the same.
        """
        if self._structure != [*map(_structure_of, self._modules)]:
            self._check_names()
        moved: dict[int, torch.Tensor] = {}
        for index, known in list(self._known.items()):
            tensor: torch.Tensor | None = known.tensor
            if index in self._slots:
                tensor = self._in_slots(index)
            if tensor is known.tensor and _look_of(tensor) == known.look:
                continue
            if index in self.frozen and not self._is_like(index, tensor):
                self._unfollow(index, tensor)
            else:
                moved[index] = self._followed(index, tensor)
        if moved:
            self._note(moved)
        return list(moved)

    def _note_structure(self) -> None:
        self._modules = list(_modules_of(self._models.values()))
        self._structure = list(map(_structure_of, self._modules))

    def _note(self, moved: Mapping[int, torch.Tensor]) -> None:
        tensors = list(self.tensors)
        for index, tensor in moved.items():
            tensors[index] = tensor
        refuse_shared_memory(self._entries, tensors, self._policies)
        self.tensors = tensors
        for index, tensor in moved.items():
            self._known[index] = _Known(tensor, _look_of(tensor))

    def _in_slots(self, index: int) -> torch.Tensor | None:
        """What modules hold as an entry, under each of its names."""
        slots = self._slots[index]
        if not slots:
            return self.tensors[index]
        tensor = slots[0].tensor
        if any(slot.tensor is not tensor for slot in slots[1:]):
            entry = self._entries[index]
            names = " and ".join(map(repr, (entry.name, *entry.tied_names)))
            raise ConfigurationError(
                f"the buffers {names} of {entry.model} were one tensor at prepare() "
                "and are several now: assign the new tensor under each of the names, "
                "or give each its own before prepare()"
            )
        return tensor

    def _followed(self, index: int, tensor: torch.Tensor | None) -> torch.Tensor:
        """A tensor that has changed, if values can still be written to it."""
        entry = self._entries[index]
        if tensor is None or not self._is_like(index, tensor):
            raise ConfigurationError(
                _buffer_text(entry, tensor)
                if entry.kind is EntryKind.BUFFER
                else _parameter_text(entry, tensor)
            )
        return tensor

    def _is_like(self, index: int, tensor: torch.Tensor | None) -> bool:
        """Whether values of an entry can be written to a tensor."""
        entry = self._entries[index]
        return (
            tensor is not None
            and tuple(tensor.shape) == entry.shape
            and tensor.dtype == TORCH_DTYPES[entry.element_type]
            and tensor.layout is torch.strided
            and not tensor.is_meta
        )

    def hold(self, entry_indexes: Collection[int]) -> None:
        """Optimizers have these parameters now, which must stay what they are."""
        for index in self.frozen.intersection(entry_indexes):
            self.frozen.discard(index)
            self._slots.pop(index, None)

    def _unfollow(self, index: int, tensor: torch.Tensor | None) -> None:
        entry = self._entries[index]
        logger.warning(
            "parameter %r of %s, which no optimizer has, is %s now: it is not followed "
            "any more, and snapshots keep what the job has of it",
            entry.name,
            entry.model,
            _now_text(tensor),
        )
        self.frozen.discard(index)
        self._known.pop(index, None)
        self._slots.pop(index, None)

    def _check_names(self) -> None:
        """Looks through the models by name, as some module holds other things.

        Raises:
            ConfigurationError: An entry of `state_dict()` is new, missing, or another
                parameter.
        """
        found = {
            (name, key): tensor
            for name, model in self._models.items()
            for key, tensor in chain(
                model.named_parameters(remove_duplicate=False),
                persistent_buffers(model),
            )
        }
        wanted = [
            (index, (entry.model, name), found.pop((entry.model, name), None))
            for index, entry in enumerate(self._entries)
            for name in (entry.name, *entry.tied_names)
        ]
        for index, (_, name), tensor in wanted:
            entry = self._entries[index]
            if self._policies.get(index) is BufferPolicy.LOCAL:
                continue
            if index not in self._known:
                continue  # it is followed no more
            if index in self.frozen:
                if tensor is None:
                    self._unfollow(index, None)
                continue
            if tensor is None:
                raise ConfigurationError(
                    _gone_text(entry, name, self.tensors[index], found)
                )
            if index not in self._policies and tensor is not self.tensors[index]:
                raise ConfigurationError(_replaced_text(entry, name))
        if found:
            raise ConfigurationError(_added_text(found))
        self._note_structure()
        slots = _slots_of(self._models.values())
        for index, held in self._slots.items():
            # A tensor that was exchanged too is still found by its slots.
            tensor = held[0].tensor if held else None
            self._slots[index] = slots.get(id(tensor), held)


def refuse_shared_memory(
    entries: Sequence[SchemaEntry],
    tensors: Sequence[torch.Tensor],
    policies: Mapping[int, BufferPolicy],
) -> None:
    """Checks that what is written to one tensor is written to no other one.

    Two buffers of the same policy may have memory in common: both get the same values.

    Raises:
        ConfigurationError: Tensors have memory in common, or one with itself.
    """
    written = [
        index
        for index in range(len(entries))
        if policies.get(index) is not BufferPolicy.LOCAL
    ]
    for index in written:
        if overlaps_itself(tensors[index]):
            raise ConfigurationError(_expanded_text(entries[index]))
    for one, other in overlapping_pairs([tensors[index] for index in written]):
        pair = written[one], written[other]
        if policies.get(pair[0]) is None or policies.get(pair[1]) != policies[pair[0]]:
            raise ConfigurationError(_shared_text(*(entries[each] for each in pair)))


def warn_of_extra_state(models: Mapping[str, nn.Module]) -> None:
    """Warns of entries of `state_dict()` that no snapshot has, being no tensors."""
    names = extra_state_names(models)
    if not names:
        return
    more = len(names) - _SHOWN_COUNT
    logger.warning(
        "%s%s: what modules give by get_extra_state() is each worker's own, and "
        "snapshots don't have it, so that load_state_dict() with the default strict="
        "True refuses them. Keep it in buffers (register_buffer), or add it by hand: "
        "state = snapshot.state_dict(); state.update((key, value) for key, value in "
        "model.state_dict().items() if key not in state)",
        ", ".join(map(repr, names[:_SHOWN_COUNT])),
        f" and {more} more" if more > 0 else "",
    )


def extra_state_names(models: Mapping[str, nn.Module]) -> list[str]:
    """Names in `state_dict()` of what modules give by `get_extra_state`."""
    return [
        ".".join(part for part in (key, _EXTRA_STATE) if part)
        for model in models.values()
        for key, module in model.named_modules()
        if getattr(type(module), "get_extra_state", nn.Module.get_extra_state)
        is not nn.Module.get_extra_state
    ]


def _look_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _structure_of(module: nn.Module) -> tuple[object, ...]:
    """What a module holds, but for the tensors of its buffers."""
    # Most modules have one or two of these, and lists of ids are the quickest.
    held = module.__dict__
    parameters, buffers, modules = (
        held["_parameters"],
        held["_buffers"],
        held["_modules"],
    )
    return (
        _identities(parameters) if parameters else None,
        [(key, each is None) for key, each in _items(buffers)] if buffers else None,
        _identities(modules) if modules else None,
        len(held["_non_persistent_buffers_set"]) if buffers else 0,
    )


def _identities(held: Any) -> tuple[list[str], list[int]]:  # noqa: ANN401, as `_items`
    if isinstance(held, dict):
        return list(held), list(map(id, dict.values(held)))
    return list(held.keys()), list(map(id, held.values()))


def _items(held: Any) -> Any:  # noqa: ANN401, scripted modules have other dictionaries
    # Not by its own `items`: with `overlap=True` that waits for values.
    return dict.items(held) if isinstance(held, dict) else held.items()


def _slots_of(models: Collection[nn.Module]) -> dict[int, list[_Slot]]:
    """Where tensors are that are in `state_dict()`, by their `id()`."""
    slots: dict[int, list[_Slot]] = {}
    for slot in chain.from_iterable(map(_slots_in, _modules_of(models))):
        if slot.tensor is not None:
            slots.setdefault(id(slot.tensor), []).append(slot)
    return slots


def _modules_of(models: Collection[nn.Module]) -> Iterator[nn.Module]:
    for model in models:
        yield from model.modules()


def _slots_in(module: nn.Module) -> Iterator[_Slot]:
    passing = getattr(module, "_non_persistent_buffers_set", ())
    for kind in _KINDS:
        for key, _ in _items(getattr(module, kind)):
            if kind == "_parameters" or key not in passing:
                yield _Slot(module, kind, key)


def _type_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _now_text(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "gone"
    return f"of shape {list(tensor.shape)} and type {_type_of(tensor)}"


def _buffer_text(entry: SchemaEntry, tensor: torch.Tensor | None) -> str:
    return (
        f"buffer {entry.name!r} of {entry.model} is {_now_text(tensor)}, but the job "
        f"has it as {entry.described}: keep it so, or leave it to every worker with "
        f"prepare(..., buffers={{{entry.name!r}: 'local'}})"
    )


def _parameter_text(entry: SchemaEntry, tensor: torch.Tensor | None) -> str:
    assert tensor is not None, "modules hold parameters"
    what = f"parameter {entry.name!r} of {entry.model} has become"
    if tuple(tensor.shape) != entry.shape:
        return (
            f"{what} {list(tensor.shape)} since prepare(), but the job trains it as "
            f"{entry.described}: give the model its shapes before prepare()"
        )
    if tensor.is_meta or tensor.layout is not torch.strided:
        return (
            f"{what} a tensor without dense values since prepare(), but the job trains "
            f"it as {entry.described}: keep its values, or set them before prepare()"
        )
    return (
        f"{what} {_type_of(tensor)} since prepare(), but the job trains it as "
        f"{entry.described}: change the type of a model before prepare() (double(), "
        "half(), to(dtype)), or put it back before step(); for 16-bit arithmetic leave "
        "the model as it is and use torch.autocast"
    )


def _gone_text(
    entry: SchemaEntry,
    name: str,
    tensor: torch.Tensor,
    found: Mapping[tuple[str, str], torch.Tensor],
) -> str:
    what = f"{entry.kind.name.lower()} {name!r} of {entry.model}"
    for (model, other), each in found.items():
        if each is tensor:
            return (
                f"{what} has become {other!r} of {model} since prepare(), and the job "
                f"goes on under the first name, also in snapshots: change what a "
                "model is made of (parametrize, prune, weight_norm, "
                "merging adapters) before prepare()"
            )
    if entry.kind is EntryKind.BUFFER:
        return _buffer_text(entry, None)
    return (
        f"{what} is gone since prepare(), but the job trains it: keep the module in "
        "the model, with requires_grad_(False) where it is to train no more, or take "
        "it out before prepare()"
    )


def _replaced_text(entry: SchemaEntry, name: str) -> str:
    return (
        f"parameter {name!r} of {entry.model} is another nn.Parameter than at "
        "prepare(), as module.weight = nn.Parameter(...) and "
        "load_state_dict(assign=True) make it, and the optimizer holds the one before: "
        "put it there before prepare(), or keep the Parameter"
    )


def _added_text(found: Mapping[tuple[str, str], torch.Tensor]) -> str:
    (model, name), first = next(iter(found.items()))
    is_parameter = isinstance(first, nn.Parameter)
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    way = (
        "build all of the model before prepare()"
        if is_parameter
        else "register it with its first value before prepare(), or with "
        "persistent=False, so that it stays each worker's own"
    )
    return (
        f"{'parameter' if is_parameter else 'buffer'} {name!r} of {model}{others} came "
        "after prepare(), so that neither the job nor its snapshots have it, and every "
        f"worker would keep its own: {way}"
    )


def _expanded_text(entry: SchemaEntry) -> str:
    what = entry.kind.name.lower()
    key = entry.name.rpartition(".")[2]
    made = (
        f"register_buffer({key!r}, values.clone())"
        if entry.kind is EntryKind.BUFFER
        else "nn.Parameter(values.clone())"
    )
    return (
        f"{what} {entry.name!r} of {entry.model} has several elements in one place of "
        "memory, as expand() makes it, so that values of the job can't be written to "
        f"it: give it memory of its own, as in {made}"
    )


def _shared_text(one: SchemaEntry, other: SchemaEntry) -> str:
    first, second = (
        f"{each.kind.name.lower()} {each.name!r} of {each.model}"
        for each in (one, other)
    )
    what = f"{first} and {second} lie over the same memory"
    if one.kind is other.kind is EntryKind.BUFFER:
        return (
            f"{what}, and prepare(buffers=...) treats them differently: give both the "
            "same policy, or one of them a copy by clone()"
        )
    if one.kind is other.kind:
        return (
            f"{what} and are two Parameters, of which each would overwrite the other: "
            "to tie them assign the Parameter itself (second.weight = first.weight, "
            "before the optimizer is built, and not second.weight.data), or give one "
            "of them a copy by clone()"
        )
    return (
        f"{what}, so that one would overwrite the other: register the buffer with a "
        "copy (clone()), with persistent=False, or let forward() take the parameter"
    )
