"""Terms survive a file of JSON."""

import json
from dataclasses import replace

from pswire.compression import Compression
from pswire.job_terms import JobTerms
from pswire.job_terms_codec import dump_terms, load_terms
from pswire.schema import ElementType, EntryKind, ModelSchema, SchemaEntry
from tests.doubles.core_values import sgd


def test_a_model_survives() -> None:
    schema = ModelSchema(
        (
            SchemaEntry(
                model="généré",
                name="a.b/../c\n",
                shape=(3, 0, 2),
                element_type=ElementType.BFLOAT16,
                tied_names=("d", "e"),
                trainable=False,
            ),
            SchemaEntry(
                name="count",
                shape=(),
                element_type=ElementType.INT64,
                kind=EntryKind.BUFFER,
            ),
        )
    )
    optimizers = (
        sgd("one"),
        replace(sgd("two", groups=((0,), ())), loss_is_sum=True),
    )

    chosen = Compression("topk", "int8", 0.25)
    terms = JobTerms(
        schema=schema,
        optimizers=optimizers,
        clip_grad_norm=0.5,
        compression=chosen,
        strategy="FedAvg(fraction=0.1, seed=0)",
    )

    dumped = json.loads(json.dumps(dump_terms(terms)))
    loaded = load_terms(dumped)

    assert loaded == terms
    assert loaded.schema.digest() == schema.digest()
    del dumped["strategy"]  # as it was written before there were any
    assert load_terms(dumped) == replace(terms, strategy="")
