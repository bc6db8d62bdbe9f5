"""Gradients with differential privacy: clipped sample by sample, with noise.

Hooks keep what each call of a module was given, and the gradient of what it returned.
From these the gradient of each sample is computed again at the step, by `torch.func`, a
few samples at a time; clipped, added up, and noise added. Only this goes into `.grad`,
and from there to the shards.

The module that is called again is the innermost one that has parameters of its own, so
that what has none, such as dropout or an activation, is not called again.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pswire.privacy import Privacy
from psworker.errors import ConfigurationError, UnsupportedError
from psworker.optim.privacy import RandomBytes, gaussian

_CHUNK_BYTES: Final = 256 << 20
"""Most bytes of gradients of single samples at a time; of one sample at least."""

_NOISE_COUNT: Final = 1 << 20
"""Numbers of noise drawn at a time."""

_NORM_ADDEND: Final = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""

_LOW_PRECISION: Final = (torch.float16, torch.bfloat16)

_SampleGradients = dict[int, torch.Tensor]
"""By `id()` of a parameter its gradients, with the samples as the first dimension."""


class _Forward(nn.Module):
    """Calls a module without its hooks, which belong to the script's own call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, arguments: Any, named: Any) -> Any:  # noqa: ANN401
        return self.module.forward(*arguments, **named)


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """A module whose calls are kept.

    Attributes:
        label: Its name, for people.
        forward: Calls it.
        parameters: By their names in `forward`.
    """

    label: str
    forward: _Forward
    parameters: Mapping[str, nn.Parameter]


@dataclass(slots=True, eq=False)
class _Call:
    """A call of a module, which a backward pass has reached.

    Attributes:
        unit: The module.
        inputs: All that it was given, flat.
        input_spec: How that was nested.
        versions: Torch's count of changes in place of each tensor that was given.
        autocast: Type that it computed in, by kind of device, if not in its own.
        gradients: Of the tensors that it returned, `None` where none came.
    """

    unit: _Unit
    inputs: list[Any]
    input_spec: TreeSpec
    versions: list[int]
    autocast: tuple[str, torch.dtype] | None
    gradients: list[torch.Tensor | None]

    @property
    def row_count(self) -> int:
        """Samples that it was of.

        Raises:
            UnsupportedError: Its first dimension is none of samples.
        """
        counts = {len(g) if g.dim() else 0 for g in self.gradients if g is not None}
        rows = counts.pop() if len(counts) == 1 else 0
        if not rows or not any(self.has_rows(each, rows) for each in self.inputs):
            raise UnsupportedError(
                f"differential_privacy: {self.unit.label} takes and returns tensors "
                "whose first dimension is not the samples of the batch, so that no "
                "gradient is of one sample: keep the batch first (batch_first=True), "
                "and compute the loss outside of the model"
            )
        return rows

    @staticmethod
    def has_rows(value: object, row_count: int) -> bool:
        """Whether a value has one part for each sample."""
        return (
            isinstance(value, torch.Tensor)
            and value.dim() > 0
            and len(value) == row_count
        )


@dataclass(slots=True, eq=False)
class _Pass:
    """A backward pass.

    Attributes:
        number: Torch's own.
        calls: Calls of modules that it has reached.
    """

    number: int
    calls: list[_Call] = field(default_factory=list)

    @property
    def row_count(self) -> int:
        """Samples that it was of.

        Raises:
            UnsupportedError: Modules were called with different numbers of rows.
        """
        counts = {call.row_count for call in self.calls}
        if len(counts) > 1:
            raise UnsupportedError(
                "differential_privacy: modules were called with "
                f"{' and '.join(map(str, sorted(counts)))} rows in one backward pass, "
                "so that it can't be told which are of one sample: keep one row for "
                "each sample from the first module to the last"
            )
        return counts.pop()


class PrivateGradients:
    """Puts private gradients in the place of those that a backward pass has made."""

    def __init__(
        self,
        privacy: Privacy,
        models: Mapping[str, nn.Module],
        random_bytes: RandomBytes,
        *,
        loss_is_sum: bool = False,
    ) -> None:
        """Watches the calls of models from now on.

        Args:
            privacy: Clipping and noise.
            models: By name.
            random_bytes: Where the noise comes from.
            loss_is_sum: Whether a loss is the sum over its batch, else it is the mean.
        """
        self._privacy = privacy
        self._random_bytes = random_bytes
        self._loss_is_sum = loss_is_sum
        self._passes: list[_Pass] = []
        self._is_checked = False
        self._trained: tuple[torch.Tensor, ...] = tuple(
            each for model in models.values() for each in model.parameters()
        )
        self._handles = [
            unit.forward.module.register_forward_hook(
                _CallHook(self, unit), with_kwargs=True
            )
            for name, model in models.items()
            for unit in _units(model, name)
        ]

    def remove(self) -> None:
        """Watches no longer."""
        for handle in self._handles:
            handle.remove()
        self.forget()

    def discard(self, parameters: Iterable[torch.Tensor]) -> None:
        """Throws gradients away that no step is to send."""
        for each in parameters:
            each.grad = None
        self.forget()

    def forget(self) -> None:
        """What was called belongs to no gradient any more."""
        self._passes.clear()

    def note(self, call: _Call, pass_number: int) -> None:
        """A backward pass has reached a call."""
        if not self._passes or self._passes[-1].number != pass_number:
            if all(each.grad is None for each in self._trained):
                self.forget()  # the script has thrown away what was there
            self._passes.append(_Pass(pass_number))
        self._passes[-1].calls.append(call)

    def replace(
        self,
        parameters: Iterable[torch.Tensor],
        sample_counts: Sequence[int],
        *,
        is_new: bool = True,
    ) -> None:
        """Replaces the gradients of parameters by private ones.

        Also where a parameter has none: which have one may tell of the samples. Where
        no backward pass was made since the last call, they are left as they are.

        Args:
            parameters: All of the optimizer.
            sample_counts: Of the batches that were drawn for this gradient.
            is_new: Whether there are gradients that no step has taken.

        Raises:
            ConfigurationError: The gradient is not of the samples that were drawn, so
                that one might count more than once. Nothing has changed.
            UnsupportedError: No gradient of single samples can be computed.
        """
        # One that was frozen since backward() would be stepped with its gradient too.
        trained = tuple(
            each for each in parameters if each.requires_grad or each.grad is not None
        )
        self._trained = trained
        if not self._passes:
            if is_new:
                raise ConfigurationError(
                    "this step's gradients come from no call of a prepared model, so "
                    "that they can't be clipped sample by sample: call the model that "
                    "prepare() returned, and leave .grad as backward() makes it"
                )
            return
        row_counts = [each.row_count for each in self._passes]
        if sorted(row_counts) != sorted(sample_counts):
            raise ConfigurationError(
                "this step is of backward passes of "
                f"{' and '.join(map(str, row_counts))} samples, and for it batches of "
                f"{' and '.join(map(str, sample_counts)) or 'no'} samples were drawn "
                "from the prepared loader: each batch is for one backward() and one "
                "step(), with one row for each of its samples"
            )
        clipped, plain = self._summed(trained, row_counts)
        if not self._is_checked:
            self._check(trained, plain)
            self._is_checked = True
        largest_weight = max(self._weight(count) for count in row_counts)
        deviation = (
            self._privacy.noise_multiplier
            * self._privacy.max_grad_norm
            * largest_weight
        )
        made = [self._noisy(each, clipped.get(id(each)), deviation) for each in trained]
        for parameter, gradient in zip(trained, made, strict=True):
            parameter.grad = gradient
        self.forget()

    def _weight(self, row_count: int) -> float:
        """What a sample's own gradient is multiplied by in that of the loss."""
        return 1.0 if self._loss_is_sum else 1.0 / row_count

    @torch.no_grad()
    def _summed(
        self, trained: Sequence[torch.Tensor], row_counts: Sequence[int]
    ) -> tuple[_SampleGradients, _SampleGradients]:
        """Sums over all samples: of clipped gradients, and of those as they are."""
        wanted = {id(each) for each in trained}
        sample_bytes = sum(4 * each.numel() for each in trained) or 1
        step = max(1, _CHUNK_BYTES // sample_bytes)
        clipped: _SampleGradients = {}
        plain: _SampleGradients = {}
        for each, row_count in zip(self._passes, row_counts, strict=True):
            limit = self._privacy.max_grad_norm * self._weight(row_count)
            for start in range(0, row_count, step):
                rows = slice(start, min(start + step, row_count))
                found = _of_samples(each.calls, rows, row_count, wanted)
                if not self._is_checked:
                    _add(plain, ((key, g.sum(0)) for key, g in found.items()))
                _add(clipped, _clipped_sums(found, limit))
        return clipped, plain

    def _check(
        self, trained: Sequence[torch.Tensor], plain: Mapping[int, torch.Tensor]
    ) -> None:
        """Compares with what the backward pass has made, once.

        Raises:
            ConfigurationError: That is something else. Nothing has changed.
        """
        for parameter in trained:
            gradient = parameter.grad
            found = plain.get(id(parameter))
            if gradient is None and found is None:
                continue
            theirs = torch.zeros((), device=parameter.device)
            theirs = theirs if gradient is None else gradient.detach().float()
            ours = torch.zeros_like(theirs) if found is None else found.float()
            if not (ours.isfinite().all() and theirs.isfinite().all()):
                continue
            is_low = torch.is_autocast_enabled() or parameter.dtype in _LOW_PRECISION
            is_low |= any(c.autocast for each in self._passes for c in each.calls)
            tolerance = (0.1 if is_low else 0.01) * theirs.norm() + 1e-6
            if (ours - theirs).norm() > tolerance:
                raise ConfigurationError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} is "
                    "not the sum of what its samples give by the calls of their "
                    "modules: use each weight through its own module only, add no "
                    "penalty on weights to the loss (weight_decay does it), and change "
                    ".grad nowhere"
                )

    def _noisy(
        self, parameter: torch.Tensor, summed: torch.Tensor | None, deviation: float
    ) -> torch.Tensor:
        """The sum with noise, as a gradient of its parameter."""
        made = torch.empty(parameter.numel(), dtype=torch.float64)
        for start in range(0, len(made), _NOISE_COUNT):
            part = made[start : start + _NOISE_COUNT]
            part.copy_(gaussian(len(part), self._random_bytes)).mul_(deviation)
        made = made.view(parameter.shape).to(parameter.device)
        if summed is not None:
            made += summed
        return made.to(parameter.dtype)


class _CallHook:
    """A forward hook: keeps what a module was given until a backward pass comes.

    In a copy of the model it does nothing, nor after the connection.
    """

    __name__ = "psworker_sample_hook"
    # What `torch.compile` looks for: it keeps calls, and is no part of a graph.
    _torchdynamo_disable = True

    def __init__(self, gradients: PrivateGradients, unit: _Unit) -> None:
        self._gradients = weakref.ref(gradients)
        self._unit = unit

    def __call__(
        self,
        module: nn.Module,
        arguments: object,
        named: object,
        output: object,
    ) -> None:
        """A module was called."""
        gradients = self._gradients()
        returned = _floats_in(output)
        is_followed = any(each.requires_grad for each in returned)
        if gradients is None or not (is_followed and torch.is_grad_enabled()):
            return
        inputs, input_spec = tree_flatten((arguments, named))
        inputs = [e.detach() if isinstance(e, torch.Tensor) else e for e in inputs]
        call = _Call(
            self._unit,
            inputs,
            input_spec,
            _versions(inputs),
            _autocast_of(returned[0].device.type),
            [None] * len(returned),
        )
        reached: dict[int, _Call] = {}

        def reach(position: int, gradient: torch.Tensor) -> None:
            number = torch._C._current_graph_task_id()
            if number not in reached:
                reached[number] = replace(call, gradients=[None] * len(returned))
                gradients.note(reached[number], number)
            reached[number].gradients[position] = gradient.detach()

        for position, each in enumerate(returned):
            if each.requires_grad:
                each.register_hook(partial(reach, position))

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _pass_on(module: nn.Module, *others: object) -> None:
    """The hook of a copy."""


def _no_hook() -> Any:  # noqa: ANN401, a hook
    return _pass_on


def _units(module: nn.Module, label: str) -> Iterator[_Unit]:
    """The outermost modules that have parameters of their own, with all within them."""
    is_own = any(each is not None for each in module._parameters.values())
    if is_own or is_parametrized(module):
        forward = _Forward(module)
        yield _Unit(label, forward, dict(forward.named_parameters()))
        return
    for name, child in module.named_children():
        yield from _units(child, f"{label}.{name}")


def _floats_in(output: object) -> list[torch.Tensor]:
    """What a module has returned, as far as a gradient may be of it."""
    return [
        each
        for each in tree_flatten(output)[0]
        if isinstance(each, torch.Tensor) and each.is_floating_point()
    ]


def _versions(inputs: Iterable[object]) -> list[int]:
    return [each._version for each in inputs if isinstance(each, torch.Tensor)]


def _autocast_of(device_type: str) -> tuple[str, torch.dtype] | None:
    if not torch.is_autocast_enabled(device_type):
        return None
    return device_type, torch.get_autocast_dtype(device_type)


def _of_samples(
    calls: Iterable[_Call], rows: slice, row_count: int, wanted: set[int]
) -> _SampleGradients:
    """Gradients of some samples by all calls, several of which may use a parameter."""
    found: _SampleGradients = {}
    for call in calls:
        named = call.unit.parameters
        for name, gradients in _of_call(call, rows, row_count).items():
            key = id(named[name])
            if key in wanted:
                _add(found, ((key, gradients),))
    return found


def _of_call(call: _Call, rows: slice, row_count: int) -> dict[str, torch.Tensor]:
    """Gradients of some samples by one call.

    Raises:
        UnsupportedError: The module can't be called for single samples.
    """
    unit = call.unit
    if _versions(call.inputs) != call.versions:
        raise UnsupportedError(
            f"differential_privacy: what {unit.label} was called with was changed in "
            "place since: change a copy"
        )
    values = {name: each.detach() for name, each in unit.parameters.items()}
    sliced = [
        each[rows] if call.has_rows(each, row_count) else each for each in call.inputs
    ]
    dims = [0 if call.has_rows(each, row_count) else None for each in call.inputs]
    reached = [index for index, g in enumerate(call.gradients) if g is not None]
    upstream = [g[rows] for g in call.gradients if g is not None]

    def of_one(inputs: list[Any], gradients: list[torch.Tensor]) -> Any:  # noqa: ANN401
        # A batch of one: modules may rely on the dimension.
        alone = [
            each if dim is None else each.unsqueeze(0)
            for each, dim in zip(inputs, dims, strict=True)
        ]
        arguments, named = tree_unflatten(alone, call.input_spec)

        def forward(parameters: dict[str, torch.Tensor]) -> Any:  # noqa: ANN401
            output = torch.func.functional_call(
                unit.forward, parameters, (arguments, named)
            )
            floats = _floats_in(output)
            return [floats[index] for index in reached]

        pull_back = torch.func.vjp(forward, values)[1]
        return pull_back([g.unsqueeze(0) for g in gradients])[0]

    device_type, dtype = call.autocast or ("cpu", torch.bfloat16)
    try:
        with torch.autocast(device_type, dtype, enabled=call.autocast is not None):
            found: dict[str, torch.Tensor] = torch.func.vmap(
                of_one, in_dims=(dims, [0] * len(upstream))
            )(sliced, upstream)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise UnsupportedError(
            f"differential_privacy: {unit.label} can't be called for each sample alone "
            f"({type(error).__name__}: {str(error)[:200]}); where it draws random "
            "numbers, as attention with dropout does, build it without them"
        ) from error
    return found


def _clipped_sums(
    found: _SampleGradients, limit: float
) -> Iterator[tuple[int, torch.Tensor]]:
    """Sums over samples, each scaled down to a norm.

    A sample whose gradient is not finite gives nothing.
    """
    squares: torch.Tensor | None = None
    for gradients in found.values():
        own = gradients.flatten(1).float().square().sum(1)
        squares = own if squares is None else squares + own.to(squares.device)
    if squares is None:
        return
    norms = squares.sqrt()
    factors = (limit / (norms + _NORM_ADDEND * limit)).clamp(max=1.0)
    is_finite = norms.isfinite()
    factors = factors.masked_fill(~is_finite, 0.0)
    for key, gradients in found.items():
        wide = torch.promote_types(gradients.dtype, torch.float32)
        flat = gradients.flatten(1).to(wide)
        if not is_finite.all():
            flat = flat.masked_fill(~is_finite.to(flat.device).unsqueeze(1), 0.0)
        own = factors.to(flat.device, wide)
        yield key, (own @ flat).view(gradients.shape[1:])


def _add(sums: _SampleGradients, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
    for key, part in parts:
        before = sums.get(key)
        sums[key] = part if before is None else before + part
