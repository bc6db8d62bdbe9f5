"""Differential privacy as a script asks for it: settings, figures, what can't have it.

The mechanism is that of DP-SGD (Abadi et al., "Deep Learning with Differential
Privacy", 2016). Every push alone has the whole noise. A sample takes part in at most
one push for each time that its data is handed out, so that k participations are k
Gaussian mechanisms of this noise one after the other: these are
sqrt(k)/noise_multiplier-GDP (Dong, Roth and Su, "Gaussian Differential Privacy", 2022).
That the batches are drawn at random is not counted in.
"""

import logging
import math
import random
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import IterableDataset

from pswire.clipping import is_clip_norm
from pswire.privacy import PARTICIPATION_COUNT_MAX, Privacy
from psworker.errors import ConfigurationError, UnsupportedError
from psworker.optim.adjusters import parts
from psworker.optim.buffer_policies import BufferChoice, BufferPolicy

logger: Final = logging.getLogger("psworker")

RandomBytes = Callable[[int], bytes]

EPSILON_MAX: Final = 500.0
"""More than that promises nothing, and is more than the accountant computes."""

_BISECTION_COUNT: Final = 60
"""Halvings after which an epsilon is exact to float64's last bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentialPrivacy:
    """What `prepare(differential_privacy=...)` takes; the same on every worker.

    Each push is (epsilon, delta) differentially private for each sample, towards the
    servers and all who see what they hold. See docs/privacy.md.

    Attributes:
        noise_multiplier: Standard deviation of the noise, as a multiple of
            `max_grad_norm`.
        max_grad_norm: L2 norm that the gradient of each sample is clipped to.
        delta: Probability that is left out of the bound, well below one sample's share
            of the data.
        epsilon_max: Bound at which training ends with a `PrivacyBudgetError`; `None`
            for as far as the accountant's figures go.
        insecure_seed: For tests: draws the noise from this seed, so that it repeats.
            Who knows the seed can take the noise off again.

    Raises:
        ConfigurationError: A value is not possible.
    """

    noise_multiplier: float
    max_grad_norm: float
    delta: float
    epsilon_max: float | None = None
    insecure_seed: int | None = None

    def __post_init__(self) -> None:
        """Checks what was given."""
        for name in ("noise_multiplier", "max_grad_norm", "delta", "epsilon_max"):
            value = getattr(self, name)
            if name == "epsilon_max" and value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not is_clip_norm(value):
                raise ConfigurationError(
                    f"{name}={value!r} is no number of differential privacy: it must "
                    "be finite and more than 0"
                )
            object.__setattr__(self, name, float(value))
        if self.delta >= 1:
            raise ConfigurationError(
                f"delta={self.delta:g} is no probability to leave out: it must be less "
                "than 1, and well below 1 divided by the number of samples"
            )

    def terms(self) -> Privacy:
        """What the job promises, with the accountant's figures.

        Raises:
            ConfigurationError: Opacus is not installed, or even one participation of a
                sample is more than allowed.
        """
        try:
            from opacus.accountants.analysis.gdp import delta_eps_mu
        except ImportError as error:
            raise ConfigurationError(
                "differential_privacy needs the accountant of Opacus: install it with "
                "pip install 'paramserver[privacy]'"
            ) from error
        counts = np.arange(1, PARTICIPATION_COUNT_MAX + 1)
        figures = epsilons(
            np.sqrt(counts) / self.noise_multiplier, self.delta, delta_eps_mu
        )
        limit = EPSILON_MAX if self.epsilon_max is None else self.epsilon_max
        allowed = tuple(each for each in figures.tolist() if each <= limit)
        if not allowed:
            raise ConfigurationError(
                f"with noise_multiplier={self.noise_multiplier:g} one participation of "
                f"a sample is epsilon={figures[0]:.4g} at delta={self.delta:g}, and at "
                f"most {limit:g} is allowed: choose more noise, or a larger epsilon_max"
            )
        return Privacy(self.noise_multiplier, self.max_grad_norm, self.delta, allowed)

    def random_bytes(self, worker_id: str) -> RandomBytes:
        """Where the noise of a worker comes from.

        From the operating system's generator: who knew the state of a generator of
        torch could compute the noise, and its CPU generator is seeded with 32 bits.
        """
        if self.insecure_seed is None:
            return secrets.token_bytes
        logger.warning(
            "differential_privacy has insecure_seed=%d, so that its noise can be "
            "computed by whoever knows the seed: nothing is promised about the samples",
            self.insecure_seed,
        )
        return random.Random(f"{self.insecure_seed} {worker_id}").randbytes


def epsilons(mu: Any, delta: float, delta_of: Callable[..., Any]) -> Any:  # noqa: ANN401
    """The least epsilon at a delta for each mu, from above; `inf` beyond what is known.

    Args:
        mu: Array of the parameters of Gaussian differential privacy.
        delta: The delta.
        delta_of: The accountant: delta of arrays `eps` and `mu`.
    """
    low, high = np.zeros_like(mu), np.full_like(mu, EPSILON_MAX)
    is_known = delta_of(eps=high, mu=mu) <= delta
    for _ in range(_BISECTION_COUNT):
        middle = (low + high) / 2
        is_enough = delta_of(eps=middle, mu=mu) <= delta
        high = np.where(is_enough, middle, high)
        low = np.where(is_enough, low, middle)
    return np.where(is_known, high, math.inf)


def gaussian(count: int, random_bytes: RandomBytes) -> torch.Tensor:
    """Standard normal numbers, float64.

    By the inverse of the distribution function, of 52 random bits each.
    """
    bits = np.frombuffer(random_bytes(8 * count), np.uint64) >> np.uint64(12)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52
    numbers: torch.Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return numbers


def check_private(
    choice: DifferentialPrivacy | None, first: Privacy | None = None
) -> None:
    """Checks what `prepare(differential_privacy=...)` was given.

    `first` is what the job promises, if this is a later call of `prepare`.

    Raises:
        ConfigurationError: It is none, or another one than the first.
    """
    if choice is None:
        return
    if not isinstance(choice, DifferentialPrivacy):
        raise ConfigurationError(
            f"differential_privacy={choice!r} is no psworker.DifferentialPrivacy: give "
            "one, or leave it out"
        )
    if first is not None and not choice.terms().agrees_with(first):
        raise ConfigurationError(
            f"the job promises what the first prepare() said ({first}); leave "
            "differential_privacy out when prepare() is called again"
        )


def refuse_unprotected(
    objects: Collection[object],
    models: Mapping[str, nn.Module],
    loaders: Mapping[str, Any],
    *,
    optimizer_count: int,
    buffers: BufferChoice,
    overlap: bool,
) -> None:
    """Refuses what would tell of samples beside the noise, or can't be told apart.

    Raises:
        UnsupportedError: With the reason and the cure.
    """
    problems = _problems(objects, loaders, optimizer_count, buffers, overlap=overlap)
    for problem in problems:
        raise UnsupportedError(f"differential_privacy {problem}")
    for model_name, model in models.items():
        for name, module in model.named_modules():
            problem = _module_problem(module)
            if problem:
                label = f"{name or type(module).__name__} of {model_name}"
                raise UnsupportedError(f"differential_privacy: {label} {problem}")


def _problems(
    objects: Collection[object],
    loaders: Mapping[str, Any],
    optimizer_count: int,
    buffers: BufferChoice,
    *,
    overlap: bool,
) -> Iterator[str]:
    if buffers not in (None, BufferPolicy.LOCAL.value):
        yield (
            f"does not go with buffers={buffers!r}: they would be sent without noise; "
            "leave it out, and each worker keeps its own"
        )
    if overlap:
        yield (
            "needs all of a gradient before any is sent, since the norm of a sample is "
            "over all parameters: leave overlap out"
        )
    scalers = [each for each in objects if isinstance(each, GradScaler)]
    if any(each.is_enabled() for each in scalers):
        yield (
            "does not go with a GradScaler, which tells all workers where a gradient "
            "without noise overflows: train in bfloat16, or without autocast"
        )
    if optimizer_count != 1:
        yield (
            f"takes one optimizer, not {optimizer_count}: each step on a batch is a "
            "further participation of its samples"
        )
    if len(loaders) != 1:
        yield (
            f"takes one loader, not {len(loaders)}: by its leases the job counts how "
            "often a sample takes part; read other data without prepare()"
        )
    if any(isinstance(each.dataset, IterableDataset) for each in loaders.values()):
        yield (
            "needs a data set with a length, of which the job leases each sample once "
            "in an epoch: an IterableDataset has no such samples"
        )
    schedulers = [
        one for each in objects if isinstance(each, LRScheduler) for one in parts(each)
    ]
    if any(isinstance(each, ReduceLROnPlateau) for each in schedulers):
        yield (
            "does not go with ReduceLROnPlateau, whose rates tell of a loss without "
            "noise: use a scheduler that goes by steps"
        )


def _module_problem(module: nn.Module) -> str:
    """Why a module can't be trained with it, and the cure; empty if it can."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return (
            "mixes the samples of a batch, so that no gradient is of one sample alone: "
            "use nn.GroupNorm or nn.LayerNorm"
        )
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and (
        module.track_running_stats
    ):
        return (
            "keeps statistics of samples without noise: set track_running_stats=False"
        )
    if isinstance(module, nn.RNNBase):
        kind = type(module).__name__
        return (
            "computes all of a batch in one, so that torch can't tell its samples "
            f"apart: call a nn.{kind}Cell for each step of the sequence"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.sparse:
            return (
                "has sparse=True, and which rows a gradient has tells what is in the "
                "batch: build it with sparse=False"
            )
        if module.max_norm is not None:
            return "has max_norm, which changes weights without noise: leave it out"
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        return (
            "has the sequence before the batch, so that its steps would be taken for "
            "samples: build it with batch_first=True"
        )
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "computes one gradient on several devices: give prepare() its module"
    is_compiled = hasattr(module, "_orig_mod") or (
        getattr(module, "_compiled_call_impl", None) is not None
    )
    if is_compiled or isinstance(module, torch.jit.ScriptModule):
        return (
            "is compiled, so that the calls of its modules can't be seen: give "
            "prepare() the plain model, and do not compile it"
        )
    return ""
