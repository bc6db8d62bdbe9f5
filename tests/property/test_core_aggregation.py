"""What the core orders and the engine computes, against a second, dumb server."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psserver.shard.core.effects import ApplyChunk
from psserver.shard.core.push import PushId, StagedChunk, Trailer
from psserver.shard.core.shard import ShardCore
from psserver.shard.tensors.apply_engine import ApplyEngine
from psserver.shard.tensors.contribution import Contribution
from pswire.job_terms import JobTerms
from pswire.optimizers import SUPPORTED, flatten_group
from pswire.placement import Chunk, _deal, _runs
from pswire.schema import (
    ElementType,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)
from pswire.torch_types import buffer_of, tensor_from_buffer
from tests.doubles.core_values import key, record
from tests.doubles.dumb_aggregation import DumbServer, Gradient, WholePush

CHUNK_BYTES = 32
RELATIVE_TOLERANCE = 1e-6

Optimizers = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Clocks = list[list[WholePush]]


def momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


class ShardedServer:
    """Cores and engines of all shards, fed with whole pushes cut into chunks."""

    def __init__(
        self,
        first_values: Sequence[torch.Tensor],
        optimizers: Optimizers,
        *,
        shards: int,
        loss_is_sum: bool = False,
    ) -> None:
        self._first_values = first_values
        schema = ModelSchema(
            tuple(
                SchemaEntry(
                    name=f"t{position}",
                    shape=tuple(each.shape),
                    element_type=ElementType.FLOAT32,
                )
                for position, each in enumerate(first_values)
            )
        )
        self.placement = _deal(_runs(schema, CHUNK_BYTES), shards)
        optimizer = optimizers([torch.nn.Parameter(each) for each in first_values])
        class_name = type(optimizer).__name__
        (group,) = optimizer.param_groups
        self._values = flatten_group(class_name, group, optimizer.defaults)
        spec = OptimizerSpec(
            name="optimizer",
            class_name=class_name,
            hyperparameter_names=SUPPORTED[class_name].names,
            groups=(ParameterGroup(tuple(range(len(first_values))), self._values),),
            loss_is_sum=loss_is_sum,
        )
        self._engines = [
            ApplyEngine(
                JobTerms(schema=schema, optimizers=(spec,)), self.placement, index
            )
            for index in range(shards)
        ]
        self.cores = [
            ShardCore([chunk.index for chunk in chunks])
            for chunks in self.placement.chunks_by_shard
        ]
        for engine in self._engines:
            engine.begin_seed()
        for chunk in self.placement.chunks:
            _, data = self.cut(chunk, [each.tolist() for each in first_values])
            self._engines[chunk.shard_index].write_seed(chunk.index, data)
        for engine in self._engines:
            engine.commit_seed()

    def start(self, names: Sequence[str]) -> None:
        for core in self.cores:
            core.install_record(record(dict.fromkeys(names, 0)))

    @staticmethod
    def cut(
        chunk: Chunk, gradients: Sequence[Gradient]
    ) -> tuple[tuple[bool, ...], memoryview]:
        """Presence and bytes of a chunk."""
        parts = [
            None
            if (gradient := gradients[piece.entry_index]) is None
            else gradient[piece.start : piece.stop]
            for piece in chunk.slices
        ]
        flat = [value for part in parts if part is not None for value in part]
        data = buffer_of(torch.tensor(flat, dtype=torch.float32))
        return tuple(part is not None for part in parts), data

    def step(self, clock: int, pushes: Sequence[WholePush], rng: random.Random) -> None:
        """One clock, its messages in an order that is drawn."""
        messages = [
            deliver
            for push in pushes
            for shard_index in range(len(self.cores))
            for deliver in self._messages(shard_index, clock, push)
        ]
        rng.shuffle(messages)
        for deliver in messages:
            deliver()
            self._apply(rng)

    def values(self) -> list[torch.Tensor]:
        pulled = [torch.empty_like(each) for each in self._first_values]
        for chunk in self.placement.chunks:
            data = memoryview(
                self._engines[chunk.shard_index].vectors.read(chunk.index)
            )
            flat = tensor_from_buffer(data, chunk.element_type)
            position = 0
            for piece in chunk.slices:
                stop = position + piece.element_count
                pulled[piece.entry_index][piece.start : piece.stop] = flat[
                    position:stop
                ]
                position = stop
        return pulled

    def _messages(
        self, shard_index: int, clock: int, push: WholePush
    ) -> list[Callable[[], None]]:
        core = self.cores[shard_index]
        push_id = PushId(key(push.worker_id), clock)
        chunks = {}
        for chunk in self.placement.chunks_by_shard[shard_index]:
            presence, data = self.cut(chunk, push.gradients)
            if any(presence):
                chunks[chunk.index] = StagedChunk(
                    digest=chunk.index, presence=presence, payload=data
                )
        trailer = Trailer(
            optimizer="optimizer",
            weight=push.weight,
            hyperparameters=(self._values,),
            chunk_indexes=frozenset(chunks),
        )

        def send_trailer() -> None:
            entry = core.open_push(push_id, clock, 0, generation=1)
            assert entry is not None
            core.add_trailer(push_id, entry, trailer)

        def send_chunk(index: int) -> None:
            entry = core.open_push(push_id, clock, 0, generation=1)
            assert entry is not None
            core.add_chunk(push_id, entry, index, chunks[index])

        return [
            send_trailer,
            *((lambda index=index: send_chunk(index)) for index in chunks),
        ]

    def _apply(self, rng: random.Random) -> None:
        for core, engine in zip(self.cores, self._engines, strict=True):
            orders = [e for e in core.take_effects() if isinstance(e, ApplyChunk)]
            rng.shuffle(orders)
            for order in orders:
                engine.apply(
                    order.chunk_index,
                    optimizer=order.optimizer,
                    contributions=[
                        Contribution(
                            worker_id=part.worker_id,
                            weight=part.weight,
                            presence=part.presence,
                            data=memoryview(part.payload),  # type: ignore[arg-type]
                            loss_scale=part.loss_scale,
                        )
                        for part in order.contributions
                    ],
                    total_weight=order.total_weight,
                    hyperparameters=order.hyperparameters,
                )
                core.chunk_applied(order.chunk_index)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[torch.Tensor], Clocks]:
    """First values, and for each clock a push of every worker."""
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    names = draw(st.permutations(["a", "b", "c", "w10", "w2"]))[
        : draw(st.integers(1, 4))
    ]
    rng = random.Random(draw(st.integers(0, 2**32)))

    def numbers(count: int) -> list[float]:
        return [round(rng.uniform(-1, 1), 3) for _ in range(count)]

    def push(name: str) -> WholePush:
        return WholePush(
            worker_id=name,
            weight=rng.choice((0.0, 1.0, 3.0, 0.125)),
            gradients=tuple(
                numbers(size) if rng.random() < 0.75 else None for size in sizes
            ),
        )

    clocks = [[push(name) for name in names] for _ in range(draw(st.integers(1, 4)))]
    return [torch.tensor(numbers(size)) for size in sizes], clocks


def run(
    job: tuple[list[torch.Tensor], Clocks],
    optimizers: Optimizers,
    *,
    shards: int,
    seed: int,
    loss_is_sum: bool = False,
) -> list[torch.Tensor]:
    first_values, clocks = job
    server = ShardedServer(
        first_values, optimizers, shards=shards, loss_is_sum=loss_is_sum
    )
    server.start([push.worker_id for push in clocks[0]])
    for number, pushes in enumerate(clocks, 1):
        server.step(number, pushes, random.Random(seed + number))
        assert {core.clocks.applied_clock for core in server.cores} == {number}
    return server.values()


@pytest.mark.parametrize("optimizers", [momentum, adam])
@settings(derandomize=True, deadline=None, max_examples=40)
@given(job=jobs(), shards=st.integers(1, 3), loss_is_sum=st.booleans())
def test_the_core_and_the_engine_equal_the_dumb_server(
    optimizers: Optimizers,
    job: tuple[list[torch.Tensor], Clocks],
    shards: int,
    loss_is_sum: bool,
) -> None:
    first_values, clocks = job
    dumb = DumbServer(first_values, optimizers, adds_up=loss_is_sum)
    for pushes in clocks:
        dumb.step(pushes)

    for ours, theirs in zip(
        run(job, optimizers, shards=shards, seed=1, loss_is_sum=loss_is_sum),
        dumb.parameters,
        strict=True,
    ):
        exact = theirs.detach()
        scale = max(float(exact.abs().max()), 1.0)
        assert float((ours - exact).abs().max()) <= RELATIVE_TOLERANCE * scale


@settings(derandomize=True, deadline=None, max_examples=30)
@given(job=jobs(), shards=st.integers(1, 3))
def test_the_order_of_arrival_changes_no_bit(
    job: tuple[list[torch.Tensor], Clocks], shards: int
) -> None:
    first, second = (
        run(job, momentum, shards=shards, seed=seed) for seed in (1, 1_000)
    )

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@settings(derandomize=True, deadline=None, max_examples=15)
@given(job=jobs())
def test_the_number_of_shards_changes_no_bit(
    job: tuple[list[torch.Tensor], Clocks],
) -> None:
    one, three = (run(job, momentum, shards=count, seed=1) for count in (1, 3))

    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
