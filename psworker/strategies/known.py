"""The table of all named strategies, for a command line. Imports no torch.

Whoever adds one writes a `Strategy` in a file of this package and an entry here.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from psworker.strategies.strategy import Strategy

KNOWN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "local-steps": "local_steps.LocalSteps",
        "model-averaging": "local_steps.ModelAveraging",
        "post-local-sgd": "local_steps.PostLocalSGD",
        "diloco": "diloco.DiLoCo",
        "streaming-diloco": "diloco.StreamingDiLoCo",
        "decoupled-diloco": "decoupled.DecoupledDiLoCo",
        "async-local-sgd": "delayed_nesterov.AsyncLocalSGD",
        "easgd": "elastic.EASGD",
        "async-easgd": "elastic.AsynchronousEASGD",
        "downpour": "downpour.Downpour",
        "fedavg": "fedavg.FedAvg",
        "fedprox": "fedavg.FedProx",
    }
)
"""Name, and module and class in this package."""


def strategy_named(name: str) -> "type[Strategy]":
    """The class of a name of `KNOWN`; `KeyError` without any."""
    module, _, class_name = KNOWN[name].rpartition(".")
    found: type[Strategy] = getattr(
        import_module(f"{__package__}.{module}"), class_name
    )
    return found
