"""The memory of what a script is handed, and of what it calls its models with."""

import copy
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any, Final

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from psworker.data.drawn_batches import BatchMemory
from psworker.data.pending import PendingData

_TENSOR_COUNT_MAX: Final = 64
_DEPTH_MAX: Final = 4
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_get_tracing_state = torch._C._get_tracing_state
_PLAIN: Final = (str, int, float, type(None))
_PREPARE_SCRIPTABLE: Final = "__prepare_scriptable__"
"""What `torch.jit.script` asks a module for in its place."""


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors of a batch, or of arguments, however they are nested."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    _collect(value, found, 0)
    return found


def _collect(value: object, found: list[torch.Tensor], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    if depth == _DEPTH_MAX or isinstance(value, _PLAIN):
        return
    inner: Iterable[Any] = ()
    if isinstance(value, (list, tuple)):
        inner = value
    elif isinstance(value, dict):
        if not value:
            return
        inner = value.values()
    elif isinstance(value, Mapping):
        inner = value.values()
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        inner = vars(value).values()
    for each in islice(inner, _TENSOR_COUNT_MAX):
        _collect(each, found, depth + 1)


class BatchTensors:
    """The storages of a batch. Weak: it keeps none of them alive."""

    def __init__(self, batch: object) -> None:
        self._marks: list[tuple[StorageWeakRef, int | None]] = []
        self.are_on_cpu: set[bool] = set()
        for each in tensors_in(batch)[:_TENSOR_COUNT_MAX]:
            if _has_storage(each):
                storage = each.untyped_storage()
                # Views of one data set, as batches may be, differ in where they begin.
                is_whole = storage.nbytes() == each.nbytes
                pointer = None if is_whole else each.data_ptr()
                self._marks.append((StorageWeakRef(storage), pointer))
                self.are_on_cpu.add(each.is_cpu)

    @property
    def is_alive(self) -> bool:
        """Whether the script, or a graph, still holds some of it."""
        return any(not storage.expired() for storage, _ in self._marks)

    def overlaps(self, storages: Mapping[int, Collection[int]]) -> bool:
        """Whether it has some of these storages, by where views begin in each."""
        for storage, pointer in self._marks:
            pointers = storages.get(storage.cdata, ())
            if pointers and (pointer is None or pointer in pointers):
                return True
        return False


class CallArguments:
    """What a model was called with."""

    def __init__(self, *arguments: object) -> None:
        self._tensors = [each for each in tensors_in(arguments) if _has_storage(each)]
        self._storages: dict[int, list[int]] = {}
        for each in self._tensors:
            key = each.untyped_storage()._cdata
            self._storages.setdefault(key, []).append(each.data_ptr())

    @property
    def row_count(self) -> int | None:
        """Length of the first tensor, `None` without one."""
        return next((len(each) for each in self._tensors if each.dim()), None)

    def are_of(self, memory: BatchMemory) -> bool:
        """Whether some of it is the memory of a batch."""
        assert isinstance(memory, BatchTensors)
        return memory.overlaps(self._storages)

    def are_elsewhere(self, memory: BatchMemory) -> bool:
        """Whether it lies on another device than a batch, which may be freed then."""
        assert isinstance(memory, BatchTensors)
        return memory.are_on_cpu.isdisjoint(each.is_cpu for each in self._tensors)


def watch_calls(models: Iterable[nn.Module], pending: PendingData) -> None:
    """Notes which batches the calls of models are of."""
    for model in models:
        if not isinstance(model, torch.jit.ScriptModule):
            model.register_forward_hook(CallHook(pending), with_kwargs=True)
            if not hasattr(model, _PREPARE_SCRIPTABLE):
                setattr(model, _PREPARE_SCRIPTABLE, _WithoutHook(model))


class ModelHook:
    """A hook on a user's model. In a copy of the model it does nothing."""

    __name__ = "psworker_call_hook"

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


class CallHook(ModelHook):
    """A forward hook: links what a model returns to the batches it was called with.

    It does nothing after the connection, which a model that lives on must not keep
    alive.
    """

    def __init__(self, pending: PendingData) -> None:
        self._pending = weakref.ref(pending)

    def __call__(
        self,
        module: nn.Module,
        arguments: object,
        named: object,
        output: object,
    ) -> None:
        """A model was called."""
        if _is_compiling() or not _is_grad_enabled():
            return
        pending = self._pending()
        if pending is None:
            return
        outputs = [each for each in tensors_in(output) if each.requires_grad]
        if not outputs or _get_tracing_state() is not None:
            return
        batches = pending.note_call(CallArguments(arguments, named))
        if not batches:
            return

        def reached(gradient: object) -> None:
            pending.note_backward(batches)

        for each in outputs[:_TENSOR_COUNT_MAX]:
            each.register_hook(reached)


class _WithoutHook:
    """Gives `torch.jit.script` the model without the hook, which it can't compile."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self) -> nn.Module:
        model = self._model()
        assert model is not None, "asked of the model itself"
        twin = copy.copy(model)
        twin._forward_hooks = _others(model._forward_hooks)
        twin._forward_pre_hooks = _others(model._forward_pre_hooks)
        del twin.__dict__[_PREPARE_SCRIPTABLE]
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return _WithoutHook, (self._model(),)


def _others(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """The hooks of a model that are not psworker's."""
    return OrderedDict(
        (key, hook)
        for key, hook in hooks.items()
        if not (isinstance(hook, ModelHook) or hook is _pass_on)
    )


def _pass_on(module: nn.Module, *others: object) -> None:
    """The hook of a copy."""


def _no_hook() -> Any:  # noqa: ANN401, a hook
    return _pass_on


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta
