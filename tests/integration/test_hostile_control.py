"""Forged calls to the coordinator: refused in words, nothing changed."""

from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from pswire.limits import PROTOCOL_VERSION
from pswire.reasons import ErrorReason
from pswire.v1 import (
    coordinator_service_pb2,
    membership_pb2,
    schema_pb2,
)
from tests.integration.forged_calls import (
    TIMEOUT_S,
    Target,
    asked,
    assert_readable,
    refusal_of,
)
from tests.integration.job import Job


def entry(**changes: Any) -> schema_pb2.SchemaEntry:  # noqa: ANN401, fields of a message
    values: dict[str, Any] = {
        "model": "model",
        "name": "0",
        "shape": [1024],
        "element_type": schema_pb2.ELEMENT_TYPE_FLOAT32,
        "kind": schema_pb2.ENTRY_KIND_PARAMETER,
        "trainable": True,
    }
    values.update(changes)
    return schema_pb2.SchemaEntry(**values)


def optimizer(class_name: str = "SGD", *indexes: int) -> schema_pb2.OptimizerSpec:
    return schema_pb2.OptimizerSpec(
        name="optimizer",
        class_name=class_name,
        hyperparameter_names=["lr"],
        groups=[
            schema_pb2.ParameterGroup(
                entry_indexes=indexes,
                hyperparameters=schema_pb2.GroupHyperparameters(values=[0.1]),
            )
        ],
    )


JOINS: Final[dict[str, tuple[str, list[Any], list[Any]]]] = {
    "no schema": ("INVALID_ARGUMENT FAILED_PRECONDITION", [], []),
    "a product beyond 64 bits": (
        "RESOURCE_EXHAUSTED",
        [entry(shape=[4194305, 4194305, 211106198978564])],
        [],
    ),
    "a negative size": ("INVALID_ARGUMENT", [entry(shape=[-1])], []),
    "an unknown type": ("INVALID_ARGUMENT", [entry(element_type=77)], []),
    "an unknown kind": ("INVALID_ARGUMENT", [entry(kind=77)], []),
    "a name twice": ("INVALID_ARGUMENT", [entry(), entry()], []),
    "an empty name": ("INVALID_ARGUMENT", [entry(name="")], []),
    "a long name": ("RESOURCE_EXHAUSTED", [entry(name="x" * 1025)], []),
    "65 dimensions": ("RESOURCE_EXHAUSTED", [entry(shape=[1] * 65)], []),
    "a pickle for an optimizer": (
        "INVALID_ARGUMENT",
        [entry()],
        [optimizer("os.system", 0)],
    ),
    "an optimizer of no tensor": (
        "INVALID_ARGUMENT",
        [entry()],
        [optimizer("SGD", 5)],
    ),
    "a negative tensor": ("INVALID_ARGUMENT", [entry()], [optimizer("SGD", -1)]),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("case", JOINS)
def test_a_forged_join_is_refused(
    target: Target, tmp_path: Path, case: str, is_first: bool
) -> None:
    """A job that has no model yet must not take its model from such a worker."""
    codes, entries, optimizers = JOINS[case]
    if not is_first:
        before = target.state()
        _, text = forged_join(target.coordinator, entries, optimizers)
        assert_readable(text)
        assert target.state() == before
        target.step()
        return
    with (
        Job(tmp_path, shard_count=1, sockets=True) as job,
        grpc.insecure_channel(job.address) as channel,
    ):
        code, text = forged_join(channel, entries, optimizers)
        assert code.name in codes.split(), text
        assert_readable(text)
        assert job.ask(lambda: job.coordinator.core.model.schema) is None


def forged_join(
    channel: grpc.Channel, entries: list[Any], optimizers: list[Any]
) -> tuple[grpc.StatusCode, str]:
    register = asked(channel, "RegisterWorker")
    request = coordinator_service_pb2.RegisterWorkerRequest(
        protocol_version=PROTOCOL_VERSION, process_id=f"forger-{id(entries)}"
    )
    (answer,) = register(request.SerializeToString(), timeout=TIMEOUT_S)
    registered = coordinator_service_pb2.RegisterWorkerResponse.FromString(answer)
    join = asked(channel, "Join")
    forged = coordinator_service_pb2.JoinRequest(
        job_id=registered.settings.job_id,
        worker=registered.worker,
        schema=schema_pb2.ModelSchema(entries=entries),
        optimizers=optimizers,
    )
    code, text, _ = refusal_of(join(forged.SerializeToString(), timeout=TIMEOUT_S))
    return code, text


def test_a_worker_names_no_more_loaders_than_it_can_use(target: Target) -> None:
    forged = coordinator_service_pb2.JoinRequest(
        job_id=target.job.shards[0].job_id,
        worker=membership_pb2.WorkerIdentity(worker_id="w0", incarnation=1),
        loaders=[f"loader {number}" for number in range(257)],
    )
    join = asked(target.coordinator, "Join")
    _, text, reason = refusal_of(join(forged.SerializeToString(), timeout=TIMEOUT_S))
    assert reason == ErrorReason.LIMIT_EXCEEDED
    assert "257 loaders" in text


SPLITS: Final[dict[str, tuple[dict[str, Any], ErrorReason]]] = {
    "no name": ({"name": ""}, ErrorReason.MALFORMED_MESSAGE),
    "a long name": ({"name": "x" * 1025}, ErrorReason.LIMIT_EXCEEDED),
    "no digest": ({"digest": "z" * 64}, ErrorReason.MALFORMED_MESSAGE),
    "a negative count": ({"item_count": -1}, ErrorReason.MALFORMED_MESSAGE),
    "a long recipe": ({"recipe": "x" * 65_537}, ErrorReason.LIMIT_EXCEEDED),
}


def forged_split(
    target: Target,
    worker_id: str = "w0",
    **changes: Any,  # noqa: ANN401, fields
) -> tuple[object, str, object]:
    values: dict[str, Any] = {"name": "x", "digest": "0" * 64, "recipe": "{}"}
    request = coordinator_service_pb2.RecordSplitRequest(
        job_id=target.job.shards[0].job_id,
        worker=membership_pb2.WorkerIdentity(worker_id=worker_id, incarnation=1),
        split=coordinator_service_pb2.SplitRecord(**{**values, **changes}),
    )
    record = asked(target.coordinator, "RecordSplit")
    return refusal_of(record(request.SerializeToString(), timeout=TIMEOUT_S))


@pytest.mark.parametrize("case", SPLITS)
def test_a_forged_split_is_refused_and_not_kept(target: Target, case: str) -> None:
    changes, expected = SPLITS[case]
    _, text, reason = forged_split(target, **changes)
    assert reason == expected, text
    assert_readable(text)
    assert target.job.ask(target.job.coordinator.data.splits.all) == ()
    target.step()


def test_only_a_worker_of_the_job_records_splits(target: Target) -> None:
    _, text, reason = forged_split(target, worker_id="nobody")
    assert reason == ErrorReason.WORKER_UNKNOWN, text
    assert target.job.ask(target.job.coordinator.data.splits.all) == ()
