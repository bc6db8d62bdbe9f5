"""A model that is too large for one message."""

import pytest

from pswire.limits import ENTRY_COUNT_MAX, MESSAGE_BYTES_MAX, MODEL_BYTES_MAX
from pswire.reasons import ErrorReason, Refusal
from pswire.schema_codec import PART_BYTES, MergedModel, cut_model
from pswire.v1 import coordinator_service_pb2 as pb
from pswire.v1 import schema_pb2
from tests.refusals import refused


def join_of(tensor_count: int, name_length: int) -> pb.JoinRequest:
    return pb.JoinRequest(
        job_id="job",
        loaders=["loader"],
        schema=schema_pb2.ModelSchema(
            entries=[
                schema_pb2.SchemaEntry(name=f"{index:0{name_length}}", shape=[3])
                for index in range(tensor_count)
            ]
        ),
        optimizers=[
            schema_pb2.OptimizerSpec(
                name=f"optimizer{index}",
                groups=[
                    schema_pb2.ParameterGroup(entry_indexes=range(tensor_count)),
                ],
            )
            for index in range(2)
        ],
    )


def merged(parts: list[pb.JoinRequest]) -> pb.JoinRequest:
    gathered = MergedModel(parts[0])
    for part in parts[1:]:
        gathered.add(part)
    return gathered.message


@pytest.mark.parametrize(
    ("tensor_count", "part_count"), [(0, 1), (2, 1), (6000, 6), (20_000, 20)]
)
def test_parts_are_the_whole_again(tensor_count: int, part_count: int) -> None:
    whole = join_of(tensor_count, 1000)

    parts = list(cut_model(join_of(tensor_count, 1000)))

    assert len(parts) == part_count
    sizes = [part.ByteSize() for part in parts]
    assert max(sizes) < 1.01 * PART_BYTES < MESSAGE_BYTES_MAX
    assert parts[0].job_id == "job"
    assert merged(parts) == whole


def test_a_snapshot_has_no_optimizers_to_cut() -> None:
    schema = join_of(3000, 1000).schema
    whole = pb.RequestSnapshotResponse(snapshot_id=7, schema=schema)

    first, *others = cut_model(pb.RequestSnapshotResponse.FromString(bytes_of(whole)))

    gathered = MergedModel(first)
    for part in others:
        gathered.add(part)
    assert len(others) == 2
    assert gathered.message == whole


def bytes_of(message: pb.RequestSnapshotResponse) -> bytes:
    return message.SerializeToString()


def test_a_description_above_the_limit_is_refused_before_it_is_sent() -> None:
    whole = join_of(70_000, 1000)

    with refused(ErrorReason.LIMIT_EXCEEDED, "limit is 64 MiB"):
        next(cut_model(whole))

    assert len(whole.schema.entries) == 70_000


def test_parts_above_the_limit_are_refused_as_they_come() -> None:
    part = join_of(3000, 1000)
    gathered = MergedModel(join_of(3000, 1000))
    for _ in range(MODEL_BYTES_MAX // part.ByteSize() - 1):
        gathered.add(part)

    with refused(ErrorReason.LIMIT_EXCEEDED, "limit is 64 MiB"):
        gathered.add(part)

    assert gathered.message.ByteSize() <= MODEL_BYTES_MAX


def test_tensors_above_the_limit_are_refused_as_they_come() -> None:
    """Empty ones take two bytes on the wire: a million of them fit one message."""
    empty = pb.JoinRequest()
    for _ in range(ENTRY_COUNT_MAX // 2 + 1):
        empty.schema.entries.add()
    gathered = MergedModel(pb.JoinRequest.FromString(empty.SerializeToString()))

    with pytest.raises(Refusal, match="200002 tensors or more, the limit is 200000"):
        gathered.add(empty)

    assert len(gathered.message.schema.entries) == ENTRY_COUNT_MAX // 2 + 1


@pytest.mark.parametrize(
    "part",
    [
        pb.JoinRequest(optimizers=[schema_pb2.OptimizerSpec()] * 30_000),
        pb.JoinRequest(loaders=[""] * 30_000),
        pb.JoinRequest(
            optimizers=[
                schema_pb2.OptimizerSpec(groups=[schema_pb2.ParameterGroup()] * 30_000)
            ]
        ),
        pb.JoinRequest(
            optimizers=[schema_pb2.OptimizerSpec(hyperparameter_names=[""] * 30_000)]
        ),
    ],
    ids=["optimizers", "loaders", "groups", "hyperparameters"],
)
def test_what_is_much_larger_in_memory_is_counted(part: pb.JoinRequest) -> None:
    gathered = MergedModel(pb.JoinRequest(job_id="job"))
    for _ in range(2):
        gathered.add(part)

    with refused(ErrorReason.LIMIT_EXCEEDED, "the limit is 65536"):
        gathered.add(part)
