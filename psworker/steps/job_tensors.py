"""The tensors of a job in this process, and who looks after them."""

from dataclasses import dataclass
from typing import Self

from psworker.optim.buffers import Buffers
from psworker.optim.declared_tensors import DeclaredTensors
from psworker.optim.prepare import Prepared
from psworker.optim.write_guard import WriteGuard
from psworker.tensors.push_compression import PushCompression
from psworker.tensors.value_store import ValueStore


@dataclass(frozen=True, slots=True)
class JobTensors:
    """What a worker trains.

    Attributes:
        given: What `prepare` was given, in the order of the job.
        store: Takes values.
        buffers: Which buffers go with a push.
        guard: Warns of values that the script has changed.
        declared: Follows tensors that the script exchanges.
        compression: What is kept for gradients in fewer bytes.
    """

    given: Prepared
    store: ValueStore
    buffers: Buffers
    guard: WriteGuard
    declared: DeclaredTensors
    compression: PushCompression

    @classmethod
    def of(cls, given: Prepared, store: ValueStore, buffers: Buffers) -> Self:
        """The tensors of a worker that has joined, whose values are the job's."""
        schema, tensors = given.bound.schema, given.bound.tensors
        return cls(
            given,
            store,
            buffers,
            WriteGuard(schema, tensors, held=given.held, followed=given.followed),
            DeclaredTensors(given.bound, given.buffers, given.followed),
            PushCompression(given.compression, schema),
        )
