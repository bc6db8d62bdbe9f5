import subprocess
import sys
from importlib import import_module

import psworker
from psworker import errors


def test_every_public_name_can_be_had() -> None:
    for name in psworker.__all__:
        if name != "WorkerConnection":
            assert getattr(psworker, name).__name__ == name
    assert psworker.WorkerConnection is psworker.Connection


def test_the_public_names_are_the_documented_ones_and_all_errors() -> None:
    error_names = {name for name in vars(errors) if name.endswith("Error")}

    assert set(psworker.__all__) == error_names | {
        "AsyncLocalSGD",
        "AsynchronousEASGD",
        "Compression",
        "Connection",
        "DifferentialPrivacy",
        "LocalConnection",
        "DecoupledDiLoCo",
        "DelayedNesterov",
        "DiLoCo",
        "Downpour",
        "EASGD",
        "FedAvg",
        "FedProx",
        "Growing",
        "LocalSteps",
        "ModelAveraging",
        "PostLocalSGD",
        "ShareOfTime",
        "Progress",
        "PushResult",
        "Rewind",
        "Snapshot",
        "SnapshotReader",
        "Strategy",
        "StreamingDiLoCo",
        "WorkerConnection",
        "connect",
    }
    assert len(psworker.__all__) == len(set(psworker.__all__))
    assert dir(psworker) == sorted(psworker.__all__)


def test_the_package_for_data_can_be_had_without_an_import_of_its_own() -> None:
    assert psworker.__getattr__("data") is import_module("psworker.data")


def test_importing_the_package_imports_neither_torch_nor_grpc() -> None:
    code = (
        "import sys, psworker, psworker.errors;"
        "print([m for m in ('torch', 'grpc', 'numpy') if m in sys.modules])"
    )

    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert shown.stdout.strip() == "[]"
