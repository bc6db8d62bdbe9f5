"""What a simulated script declares: its optimizer with more groups, or another one."""

from dataclasses import replace

from pswire.schema import ElementType, ModelSchema, OptimizerSpec, SchemaEntry
from tests.doubles.core_values import sgd

SCHEMA = ModelSchema(
    tuple(
        SchemaEntry(name=name, shape=(3,), element_type=ElementType.FLOAT32)
        for name in ("weight", "added", "added later")
    )
)

FIRST = sgd()

SECOND = replace(sgd(), name="second")
"""Of scripts that step twice on a batch."""

LATER: tuple[OptimizerSpec, ...] = (
    sgd(groups=((0,), (1,))),
    sgd(groups=((0,), (1,), (2,))),
    replace(sgd(groups=((0, 1, 2),)), exchange_count=1),
)
"""Two groups are added, one after the other; then another optimizer is prepared."""
