"""The buffers of a worker's models: where they are, which have changed, who sends them.

In the user's thread only. What a worker sends is a buffer that its script, a forward
pass most of all, has changed since the shards' value was last written into it.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple, Self

import torch
import xxhash
from torch import nn

from pswire.frames import bits_to_bytes
from pswire.membership import Record, WorkerKey
from pswire.schema import OptimizerSpec
from pswire.torch_types import buffer_of
from psworker.optim.buffer_policies import BufferPolicy
from psworker.optim.model_schema import BoundSchema
from psworker.optim.write_guard import Look, Samples, bytes_here
from psworker.tensors.value_store import Scope, ValueStore

_COMPARED_BYTES_MAX: Final = 64 << 10
"""Buffers up to this size are compared by their bytes. Of larger ones, those that only
a write through `.data` has changed are not noticed, as torch does not count it."""


class _Mark(NamedTuple):
    """What a buffer looked like when its value was the shards'.

    Attributes:
        memory: Its address, and torch's count of writes to it.
        digest: Of its bytes, None for a large one.
    """

    memory: tuple[int, int]
    digest: int | None


class Buffers:
    """The buffers of one worker, with their policies.

    Attributes:
        entries: All tensors of the models.
        policies: Of every buffer, by its entry in the schema.
        local: Entries that take no part in anything.
        frozen: Parameters that no optimizer has, whose values are sent like those of
            the leader's buffers.
    """

    def __init__(
        self,
        bound: BoundSchema,
        policies: Mapping[int, BufferPolicy],
        specs: Iterable[OptimizerSpec] = (),
        frozen: Collection[int] = (),
    ) -> None:
        self.entries = bound.schema.entries
        self.frozen = frozenset(frozen)
        indexes = bound.index_of_tensors()
        self._trees = [EntryTree.of(each, indexes) for each in bound.models.values()]
        self.policies = policies
        self._specs = {spec.name: spec for spec in specs}
        self._scopes: dict[str, Scope] = {}
        self.local = frozenset(
            index for index, each in policies.items() if each is BufferPolicy.LOCAL
        )
        self._sent = [
            index
            for index in policies
            if index not in self.local and self.entries[index].element_count
        ]
        self._marks: dict[int, _Mark] = {}
        self._samples = Samples(())
        self._sampled: list[int] = []
        self._looks: dict[int, Look] = {}

    def hold(self, entry_indexes: Iterable[int]) -> None:
        """Sends no more values of these, as an optimizer has them, or nobody has."""
        self.frozen = self.frozen.difference(entry_indexes)

    @property
    def value_entries(self) -> bytes:
        """For a header, which tensors a push has values of, if it has any of them."""
        if not self.frozen:
            return b""
        return bits_to_bytes(
            [index in self.frozen for index in range(len(self.entries))]
        )

    @property
    def are_sent(self) -> bool:
        """Whether there is any buffer, or frozen parameter, that takes part."""
        return bool(self._sent or self.frozen)

    def forget(self, index: int) -> None:
        """A buffer is another tensor now, or has other memory."""
        self._marks.pop(index, None)
        self._looks.pop(index, None)

    def declare(self, spec: OptimizerSpec) -> None:
        """An optimizer has other groups, or another one is in its place."""
        self._specs[spec.name] = spec
        self._scopes.clear()

    def scope_of(self, optimizer: str) -> Scope:
        """What the values that answer a push of an optimizer may change.

        The buffers of other optimizers' modules are left alone: a graph may hold them,
        as that of a generator's batch while its discriminator steps. The answer to the
        next push of their own has them. Buffers of modules that no optimizer has are
        written with each push.
        """
        if optimizer not in self._scopes:
            owners = owners_of_buffers(self._trees, self._specs.values())
            updated = (
                index
                for group in self._specs[optimizer].groups
                for index in group.entry_indexes
            )
            withheld = (
                index
                for index in self._sent
                if optimizer not in owners.get(index, (optimizer,))
            )
            self._scopes[optimizer] = Scope(frozenset(updated), frozenset(withheld))
        return self._scopes[optimizer]

    def note_all(self, store: ValueStore) -> None:
        """All values are those of the shards."""
        store.written.clear()
        self._mark(store, [*self._sent, *self.frozen])

    def note_written(self, store: ValueStore) -> None:
        """Values of the shards were written into the buffers that the store lists."""
        if not self.are_sent:
            store.written.clear()
            return
        sent = (*self._sent, *self.frozen)
        written = [index for index in sent if index in store.written]
        for index in store.passed_over:
            self.forget(index)  # it is sent with the next push, whose answer has it
        store.written.clear()
        store.passed_over.clear()
        self._mark(store, written)

    def changed(self, store: ValueStore, *, is_leader: bool) -> dict[int, torch.Tensor]:
        """Copies of the buffers that this worker has to send, by their entries."""
        due = [
            index
            for index in self._sent
            if is_leader or self.policies[index] is BufferPolicy.MEAN
        ]
        unsure = [index for index in due if self._has_no_write(index, store)]
        digests = dict(zip(unsure, _digests_of(store, unsure), strict=True))
        found = [
            index
            for index in due
            if index not in digests or digests[index] != self._marks[index].digest
        ]
        if is_leader and self.frozen:
            looks = self._looks_of_frozen(store)
            found += [
                index for index, look in looks.items() if look != self._looks.get(index)
            ]
        return {index: store.tensors[index].detach().clone() for index in found}

    def add_to(
        self, held: list[torch.Tensor | None], store: ValueStore, *, is_leader: bool
    ) -> bytes:
        """Puts the buffers that this worker has to send into the gradients of a push.

        Args:
            held: One for each entry; `None` for buffers.
            store: Has their values.
            is_leader: Whether this worker sends the leader's.

        Returns:
            For the trailer, bits of the buffers that are averaged in SSP and ASP; empty
            if none is sent.
        """
        changed = self.changed(store, is_leader=is_leader)
        for index, value in changed.items():
            held[index] = value
        if not changed:
            return b""
        return bits_to_bytes(
            [each is BufferPolicy.MEAN for _, each in sorted(self.policies.items())]
        )

    def _has_no_write(self, index: int, store: ValueStore) -> bool:
        mark = self._marks.get(index)
        tensor = store.tensors[index]
        return mark is not None and mark.memory == _memory_of(tensor)

    def _looks_of_frozen(self, store: ValueStore) -> dict[int, Look]:
        sampled = sorted(self.frozen)
        tensors = [store.tensors[index] for index in sampled]
        if len(tensors) != len(self._sampled) or any(
            a is not b for a, b in zip(tensors, self._samples.tensors, strict=True)
        ):
            self._samples, self._sampled = Samples(tensors), sampled
        return dict(zip(sampled, self._samples.looks(), strict=True))

    def _mark(self, store: ValueStore, indexes: list[int]) -> None:
        if not self.frozen.isdisjoint(indexes):
            looks = self._looks_of_frozen(store)
            self._looks.update({i: looks[i] for i in indexes if i in looks})
            indexes = [index for index in indexes if index not in looks]
        digests = _digests_of(store, indexes)
        for index, digest in zip(indexes, digests, strict=True):
            self._marks[index] = _Mark(_memory_of(store.tensors[index]), digest)


def leads(record: Record | None, worker: WorkerKey, sequence: int) -> bool:
    """Whether a worker sends the leader's buffers with a push.

    It is the member of the lowest rank that contributes to the clock. Where workers
    know different records two may send: the shards take the mean of them.
    """
    member = record.member_of(worker) if record is not None else None
    if record is None or member is None:
        return False
    clock = member.clock_of(sequence)
    members = [
        (each.rank, each.worker.worker_id, each.worker)
        for each in record.members
        if not record.mode.rules.is_clocked or each.base_clock < clock
    ]
    return bool(members) and min(members, key=lambda each: each[:2])[2] == worker


class EntryTree(NamedTuple):
    """The entries of a module, and of those within it.

    Attributes:
        own: Entries of the module itself.
        children: The modules within it.
    """

    own: tuple[int, ...]
    children: tuple["EntryTree", ...]

    @classmethod
    def of(cls, module: nn.Module, indexes: Mapping[int, int]) -> Self:
        """Describes a module, with entries by the `id()` of their tensors."""
        tensors = (*module.parameters(False), *module.buffers(False))
        own = tuple(indexes[id(each)] for each in tensors if id(each) in indexes)
        return cls(own, tuple(cls.of(each, indexes) for each in module.children()))


def owners_of_buffers(
    models: Iterable[EntryTree], specs: Iterable[OptimizerSpec]
) -> dict[int, frozenset[str]]:
    """Optimizers that the module of each buffer trains with, by its entry.

    Those with parameters of the module itself; where there are none, of the smallest
    module around it that has some. Buffers of a model that none trains are left out.
    """
    holders: dict[int, set[str]] = {}
    for spec in specs:
        for group in spec.groups:
            for index in group.entry_indexes:
                holders.setdefault(index, set()).add(spec.name)
    owners: dict[int, frozenset[str]] = {}

    def visit(module: EntryTree) -> tuple[frozenset[str], list[int]]:
        """Optimizers of a module, and its entries that have none yet."""
        found = [visit(child) for child in module.children]
        names = frozenset[str]().union(
            *(holders.get(index, ()) for index in module.own),
            *(each for each, _ in found),
        )
        waiting = [index for index in module.own if index not in holders]
        waiting += [index for _, more in found for index in more]
        if not names:
            return names, waiting
        for index in waiting:
            owners[index] = owners.get(index, frozenset()) | names
        return names, []

    for model in models:
        visit(model)
    return owners


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


def _digests_of(store: ValueStore, indexes: list[int]) -> list[int | None]:
    """Of each small buffer; None for a large one."""
    tensors = [store.tensors[index] for index in indexes]
    small = bytes_here(each for each in tensors if each.nbytes <= _COMPARED_BYTES_MAX)
    digests = iter([xxhash.xxh3_64_intdigest(buffer_of(each)) for each in small])
    return [
        next(digests) if each.nbytes <= _COMPARED_BYTES_MAX else None
        for each in tensors
    ]
