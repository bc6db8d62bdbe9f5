"""Where a model announces gradients that are there, and tensors about to be read.

A tensor is about to be read when its module is called, and when it is looked up in its
module: `self.out.weight`, `parameters()`, `state_dict()`. Only a reference that was
taken before is not seen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from psworker.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_KINDS: Final = ("_parameters", "_buffers")

GradientIsThere = Callable[[int], None]
AboutToRead = Callable[[Sequence[int]], None]


class ModelHooks:
    """Hooks on all models of a job.

    Attributes:
        sees_reads: Whether all reading is announced. Not of a module that was compiled
            in place.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        tensors: Sequence[torch.Tensor],
        *,
        about_to_read: AboutToRead,
        gradient_is_there: GradientIsThere | None = None,
    ) -> None:
        """Registers the hooks.

        Args:
            models: As the user calls them.
            tensors: One for each entry of the schema.
            about_to_read: Called with entries before they are read; may wait.
            gradient_is_there: Called with an entry whose gradient a backward pass has
                added to.
        """
        self._tensors = tensors
        self._numbers = {id(tensor): index for index, tensor in enumerate(tensors)}
        # Not traced by `torch.compile`, wherever the script puts it.
        self._gradient_is_there: GradientIsThere | None = (
            gradient_is_there and torch.compiler.disable(gradient_is_there)
        )
        self._about_to_read = torch.compiler.disable(about_to_read)
        self._handles: list[RemovableHandle] = []
        self._watched: list[nn.Module] = []
        self._seen: set[int] = set()
        self._with_gradient: set[int] = set()
        self.sees_reads = True
        for model in models:
            self._watch(model)
        self.watch_gradients()

    def watch_gradients(self) -> None:
        """Looks for tensors that were unfrozen since."""
        call = self._gradient_is_there
        if call is None:
            return
        for index, tensor in enumerate(self._tensors):
            if tensor.requires_grad and index not in self._with_gradient:
                self._with_gradient.add(index)
                self._handles.append(
                    tensor.register_post_accumulate_grad_hook(
                        lambda _, index=index, call=call: call(index)
                    )
                )

    def remove(self) -> None:
        """Takes all down."""
        for handle in self._handles:
            handle.remove()
        for module in self._watched:
            for kind in _KINDS:
                module.__dict__[kind] = dict(module.__dict__[kind])
        self._handles.clear()
        self._watched.clear()

    def _watch(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        if _is_compiled(module):
            inner = getattr(module, "_orig_mod", None)
            if inner is None:
                self.sees_reads = False  # its hooks and look-ups are compiled too
                return
            entries = self._entries_of((*inner.parameters(), *inner.buffers()))
            self._call_before(module, entries)
            return
        held = (*module._parameters.values(), *module._buffers.values())
        own = self._entries_of((*held, *_kept_aside(module)))
        if own:
            self._call_before(module, own)
            self._watched.append(module)
            for kind in _KINDS:
                tensors = module.__dict__[kind]
                numbers = {
                    name: self._numbers[id(tensor)]
                    for name, tensor in tensors.items()
                    if id(tensor) in self._numbers
                }
                if numbers:
                    watched = WatchedTensors(tensors, numbers, self._about_to_read)
                    module.__dict__[kind] = watched
        for child in module.children():
            self._watch(child)

    def _call_before(self, module: nn.Module, entries: Sequence[int]) -> None:
        hook = BeforeForward(entries, self._about_to_read)
        # Before hooks that make the module's weight, as those of `spectral_norm`.
        self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def _entries_of(self, tensors: Iterable[torch.Tensor | None]) -> list[int]:
        found = {self._numbers.get(id(tensor)) for tensor in tensors}
        return sorted(index for index in found if index is not None)


class BeforeForward:
    """A hook of a module. In a copy of the module it does nothing."""

    # What `torch.compile` looks for: the wait is no part of a graph.
    _torchdynamo_disable = True

    def __init__(self, entries: Sequence[int], about_to_read: AboutToRead) -> None:
        self._entries = entries
        self._about_to_read = about_to_read

    @property
    def __name__(self) -> str:
        """What `torch.jit.script` asks for first, of what it can't compile.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "torch.jit.script can't compile a model whose steps overlap, since it "
            "would have to compile the wait for its values too: script a new model "
            "that has loaded its state_dict(), or this one after ps.close()"
        )

    def __call__(self, module: nn.Module, inputs: object) -> None:
        """Waits for the module's values."""
        self._about_to_read(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


class WatchedTensors(dict[str, torch.Tensor | None]):
    """Parameters or buffers of a module, which are waited for when they are looked up.

    A copy or pickle of it is a plain dictionary. `get` does not wait: by it psworker
    itself finds what is there.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        numbers: Mapping[str, int],
        about_to_read: AboutToRead,
    ) -> None:
        super().__init__(tensors)
        self._numbers = numbers
        self._all = tuple(numbers.values())
        self._about_to_read = about_to_read

    def __getitem__(self, name: str) -> torch.Tensor | None:
        number = self._numbers.get(name)
        if number is not None:
            self._about_to_read((number,))
        return super().__getitem__(name)

    def items(self) -> Any:  # noqa: ANN401, a view of the dictionary
        """As those of a dictionary, when all have come."""
        self._about_to_read(self._all)
        return super().items()

    def values(self) -> Any:  # noqa: ANN401, a view of the dictionary
        """As those of a dictionary, when all have come."""
        self._about_to_read(self._all)
        return super().values()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


def _pass_on(module: nn.Module, inputs: object) -> None:
    """The hook of a copy."""


def _no_hook() -> Callable[[nn.Module, object], None]:
    return _pass_on


def _is_compiled(module: nn.Module) -> bool:
    return (
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or isinstance(module, torch.jit.ScriptModule)
    )


def _kept_aside(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that a module keeps in lists of its own, as recurrent ones do."""
    for kept in module.__dict__.values():
        if isinstance(kept, list | tuple):
            yield from (each for each in kept if isinstance(each, torch.Tensor))
