"""What all workers of a job agree on, as one value."""

from dataclasses import replace

from pswire.compression import Compression
from pswire.job_settings import JobSettings
from pswire.job_terms import JobTerms
from pswire.limits import VALUES_PART_BYTES
from pswire.placement import place
from pswire.schema_codec import read_terms, terms_fields
from pswire.v1 import coordinator_service_pb2 as messages
from tests.doubles.core_values import SCHEMA, sgd

SETTINGS = JobSettings(job_id="job", shard_count=2)
TERMS = JobTerms(
    schema=SCHEMA,
    optimizers=(sgd("one"), sgd("two"), replace(sgd("one"), exchange_count=1)),
    clip_grad_norm=1.5,
    compression=Compression("topk", "int8", 0.25),
)


def test_terms_come_back_from_each_message_that_has_them() -> None:
    for kind in (messages.JoinRequest, messages.ShardView):
        encoded = kind(**terms_fields(TERMS)).SerializeToString()
        assert read_terms(kind.FromString(encoded)) == TERMS


def test_later_declarations_follow_the_first_ones() -> None:
    assert TERMS.first_optimizers == (sgd("one"), sgd("two"))
    assert TERMS.declared == TERMS.optimizers[2:]


def test_the_compression_bounds_the_chunks_of_the_placement() -> None:
    asked = replace(SETTINGS, chunk_bytes=2 * VALUES_PART_BYTES)
    plain = JobTerms(schema=SCHEMA, optimizers=())

    assert plain.chunk_bytes(asked) == 2 * VALUES_PART_BYTES
    assert TERMS.chunk_bytes(asked) == VALUES_PART_BYTES
    assert TERMS.placement(asked) == place(SCHEMA, 2, VALUES_PART_BYTES)
