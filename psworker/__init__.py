"""The client of paramserver: train with it, or read snapshots.

    ps = psworker.connect()
    model, optimizer, loader = ps.prepare(model, optimizer, loader)

Names are imported on first use: the command line imports this package too, and does
without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from psworker.tracebacks import install_hooks, shorten

install_hooks()  # first of all: Ctrl-C may come while the rest is imported

from psworker.fork_guard import disable_grpc_fork_handlers  # noqa: E402

disable_grpc_fork_handlers()

from psworker.errors import REFUSALS  # noqa: E402, not before the line above

shorten(*REFUSALS)

if TYPE_CHECKING:
    from pswire.delayed_nesterov import DelayedNesterov
    from psworker.connecting import connect
    from psworker.connection import Connection, LocalConnection, WorkerConnection
    from psworker.errors import (
        AuthenticationError,
        ClosedError,
        ConfigurationError,
        ConnectError,
        CorruptionError,
        DataOrderError,
        EvictedError,
        HyperparameterError,
        JobEndedError,
        JobFailedError,
        LimitError,
        OptimizerMismatchError,
        OptimizerUnsupportedError,
        PermissionDeniedError,
        PrivacyBudgetError,
        ProtocolError,
        PsError,
        SchemaMismatchError,
        ServerError,
        ShardLostError,
        SnapshotError,
        SnapshotGoneError,
        SplitError,
        StalenessError,
        StartTimeoutError,
        StepTimeoutError,
        UnavailableError,
        UnsupportedError,
        VersionMismatchError,
        WaitTimeoutError,
        WorkerIdTakenError,
    )
    from psworker.member.script_state import Rewind
    from psworker.optim.privacy import DifferentialPrivacy
    from psworker.optim.push_result import PushResult
    from psworker.snapshots.snapshot import Snapshot, SnapshotReader
    from psworker.strategies.decoupled import DecoupledDiLoCo
    from psworker.strategies.delayed_nesterov import AsyncLocalSGD
    from psworker.strategies.diloco import DiLoCo, StreamingDiLoCo
    from psworker.strategies.downpour import Downpour
    from psworker.strategies.elastic import EASGD, AsynchronousEASGD
    from psworker.strategies.fedavg import FedAvg, FedProx
    from psworker.strategies.local_steps import (
        LocalSteps,
        ModelAveraging,
        PostLocalSGD,
    )
    from psworker.strategies.pace import Growing, ShareOfTime
    from psworker.strategies.rounds import Progress
    from psworker.strategies.strategy import Strategy
    from psworker.tensors.compression import Compression

__all__ = [
    "EASGD",
    "AsyncLocalSGD",
    "AsynchronousEASGD",
    "AuthenticationError",
    "ClosedError",
    "Compression",
    "ConfigurationError",
    "ConnectError",
    "Connection",
    "CorruptionError",
    "DataOrderError",
    "DecoupledDiLoCo",
    "DelayedNesterov",
    "DiLoCo",
    "DifferentialPrivacy",
    "Downpour",
    "EvictedError",
    "FedAvg",
    "FedProx",
    "Growing",
    "HyperparameterError",
    "JobEndedError",
    "JobFailedError",
    "LimitError",
    "LocalConnection",
    "LocalSteps",
    "ModelAveraging",
    "OptimizerMismatchError",
    "OptimizerUnsupportedError",
    "PermissionDeniedError",
    "PostLocalSGD",
    "PrivacyBudgetError",
    "Progress",
    "ProtocolError",
    "PsError",
    "PushResult",
    "Rewind",
    "SchemaMismatchError",
    "ServerError",
    "ShardLostError",
    "ShareOfTime",
    "Snapshot",
    "SnapshotError",
    "SnapshotGoneError",
    "SnapshotReader",
    "SplitError",
    "StalenessError",
    "StartTimeoutError",
    "StepTimeoutError",
    "Strategy",
    "StreamingDiLoCo",
    "UnavailableError",
    "UnsupportedError",
    "VersionMismatchError",
    "WaitTimeoutError",
    "WorkerConnection",
    "WorkerIdTakenError",
    "connect",
]

_MODULES = {
    "FedProx": "strategies.fedavg",
    "FedAvg": "strategies.fedavg",
    "EASGD": "strategies.elastic",
    "Downpour": "strategies.downpour",
    "AsynchronousEASGD": "strategies.elastic",
    "AsyncLocalSGD": "strategies.delayed_nesterov",
    "Compression": "tensors.compression",
    "Connection": "connection",
    "LocalConnection": "connection",
    "connect": "connecting",
    "DifferentialPrivacy": "optim.privacy",
    "DecoupledDiLoCo": "strategies.decoupled",
    "DiLoCo": "strategies.diloco",
    "Growing": "strategies.pace",
    "LocalSteps": "strategies.local_steps",
    "ModelAveraging": "strategies.local_steps",
    "PostLocalSGD": "strategies.local_steps",
    "ShareOfTime": "strategies.pace",
    "Progress": "strategies.rounds",
    "PushResult": "optim.push_result",
    "Rewind": "member.script_state",
    "Snapshot": "snapshots.snapshot",
    "SnapshotReader": "snapshots.snapshot",
    "Strategy": "strategies.strategy",
    "StreamingDiLoCo": "strategies.diloco",
    "WorkerConnection": "connection",
}


def __getattr__(name: str) -> object:
    if name == "data":
        # So that `psworker.data.split` needs no import of its own.
        return import_module(f"{__name__}.data")
    if name == "DelayedNesterov":  # shards run it too: it is part of the contract
        return import_module("pswire.delayed_nesterov").DelayedNesterov
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_MODULES.get(name, 'errors')}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
