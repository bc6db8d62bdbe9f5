"""Fields are counted before they are parsed, as many as a parser would find."""

from typing import Any

from google.protobuf.message import DecodeError, Message
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from psserver.edge.decoding import shape_of
from pswire.message_fields import check_field_count
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import coordinator_service_pb2, membership_pb2, push_pb2, schema_pb2

checked = settings(derandomize=True, deadline=None, max_examples=300)

texts = st.text(max_size=6)
integers = st.integers(-(2**31), 2**31 - 1)
ranges = st.lists(
    st.builds(push_pb2.DataRange, loader=texts, start=integers), max_size=4
)
groups = st.builds(
    schema_pb2.GroupHyperparameters, values=st.lists(st.floats(0, 1), max_size=4)
)
trailers = st.builds(
    push_pb2.PushTrailer,
    weight=st.floats(0, 1),
    groups=st.lists(groups, max_size=4),
    chunk_bitmap=st.binary(max_size=200),
    ranges=ranges,
    scheduler_steps=st.lists(integers, max_size=40),
)
entries = st.builds(
    schema_pb2.SchemaEntry,
    name=texts,
    shape=st.lists(integers, max_size=5),
    tied_names=st.lists(texts, max_size=3),
    trainable=st.booleans(),
)
optimizers = st.builds(
    schema_pb2.OptimizerSpec,
    hyperparameter_names=st.lists(texts, max_size=3),
    groups=st.lists(
        st.builds(
            schema_pb2.ParameterGroup,
            entry_indexes=st.lists(integers, max_size=30),
            hyperparameters=groups,
        ),
        max_size=3,
    ),
)
joins = st.builds(
    coordinator_service_pb2.JoinRequest,
    worker=st.builds(membership_pb2.WorkerIdentity, worker_id=texts),
    schema=st.builds(schema_pb2.ModelSchema, entries=st.lists(entries, max_size=5)),
    optimizers=st.lists(optimizers, max_size=2),
    loaders=st.lists(texts, max_size=3),
)
messages = st.one_of(trailers, joins)


def count_of(message: Message) -> int:
    """Fields of a parsed message as they are on the wire, and elements of runs."""
    count = 0
    for field, value in message.ListFields():
        found: Any = value
        is_many = not isinstance(found, bytes | str) and hasattr(found, "__len__")
        items = list(found) if is_many else [found]
        if isinstance(items[0], Message):
            count += sum(1 + count_of(item) for item in items)
        elif field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            count += 1  # a packed run of numbers that all have their bytes
        else:
            count += len(items)
    return count


def is_refused(data: bytes, kind: type[Message], count_max: int) -> bool:
    shape = shape_of(kind.DESCRIPTOR)
    found: Refusal | None = None
    try:
        check_field_count(data, shape, kind.__name__, count_max=count_max)
    except Refusal as refusal:
        found = refusal
    assert found is None or found.reason is ErrorReason.LIMIT_EXCEEDED
    return found is not None


@checked
@given(messages)
def test_the_limit_is_exact(message: Message) -> None:
    data = message.SerializeToString()
    count = count_of(message)
    assume(count)

    assert not is_refused(data, type(message), count)
    assert is_refused(data, type(message), count - 1)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[type[Message], bytes]:
    """A message that was cut, overwritten, added to or thinned out."""
    message = draw(messages)
    data = bytearray(message.SerializeToString())
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["cut", "overwrite", "insert", "delete"]))
        if kind == "cut":
            del data[position:]
        elif kind == "overwrite" and position < len(data):
            data[position] = draw(st.integers(0, 255))
        elif kind == "insert":
            data[position:position] = draw(st.binary(min_size=1, max_size=6))
        else:
            del data[position : position + draw(st.integers(1, 6))]
    return type(message), bytes(data)


@settings(checked, max_examples=500)
@given(mutated())
@example((push_pb2.PushTrailer, b"\xf2\x3f\x00" * 40))  # unknown ones
@example((push_pb2.PushTrailer, b"\x53" * 50 + b"\x54" * 50))  # groups
@example((push_pb2.PushTrailer, b"\x12" + b"\x80" * 9 + b"\x00"))  # a long length
def test_what_a_parser_takes_has_been_counted(
    case: tuple[type[Message], bytes],
) -> None:
    kind, data = case
    try:
        parsed = kind.FromString(data)
    except DecodeError:
        is_refused(data, kind, 3)  # it ends, whatever it finds
        return
    count = count_of(parsed)
    assume(count)
    assert is_refused(data, kind, count - 1)


@checked
@given(st.binary(max_size=200), st.integers(0, 20))
def test_noise_is_counted_or_left_to_the_parser(data: bytes, count_max: int) -> None:
    is_refused(data, coordinator_service_pb2.JoinRequest, count_max)


def test_unknown_fields_and_groups_count() -> None:
    kind = push_pb2.PushTrailer
    assert is_refused(b"\xf2\x3f\x00" * 40, kind, 39)
    assert not is_refused(b"\xf2\x3f\x00" * 40, kind, 40)
    assert is_refused(b"\x53\x54" * 20, kind, 39)
    # Within a field that is no message nothing is counted, whatever it looks like.
    assert not is_refused(b"\x2a\x28" + b"\x12\x00" * 20, kind, 1)
