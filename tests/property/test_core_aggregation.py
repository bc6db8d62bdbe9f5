"""What the core orders and the engine computes, against a second, dumb server."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psserver.shard.core.effects import ApplyChunk, MeasureClock, Staged
from psserver.shard.core.push import PushId, StagedChunk, Trailer
from psserver.shard.core.shard import ShardCore
from psserver.shard.core.shard_state import ShardRules
from psserver.shard.host.chunk_updates import with_bytes
from psserver.shard.tensors.apply_engine import ApplyEngine
from pswire.aggregation import Aggregation, BadGradientPolicy, UpdateRules
from pswire.job_terms import JobTerms
from pswire.membership import ClockChoice
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
from tests.doubles.dumb_aggregation import (
    DumbRules,
    DumbServer,
    Gradient,
    WholePush,
)

CHUNK_BYTES = 32
RELATIVE_TOLERANCE = 1e-6
NOT_MEASURED = UpdateRules()

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
        update: UpdateRules = NOT_MEASURED,
    ) -> None:
        self._first_values = first_values
        self._update = update
        self._staged: dict[PushId, dict[int, ClockChoice]] = {}
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
                JobTerms(schema=schema, optimizers=(spec,)),
                self.placement,
                index,
                aggregation=update.aggregation,
            )
            for index in range(shards)
        ]
        self.cores = [
            ShardCore(
                [chunk.index for chunk in chunks],
                rules=ShardRules(
                    shard_index=index, shard_count=shards, update=self._update
                ),
            )
            for index, chunks in enumerate(self.placement.chunks_by_shard)
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
        """Whatever is ordered; a worker that hears all shards alike commits."""
        while any(core.state.effects for core in self.cores):
            for index in rng.sample(range(len(self.cores)), len(self.cores)):
                self._carry_out(index, rng)
            for push, parts in list(self._staged.items()):
                self._commit_if_alike(push, parts)

    def _commit_if_alike(self, push: PushId, parts: dict[int, ClockChoice]) -> None:
        if len(parts) == len(self.cores):
            del self._staged[push]
            measured = tuple(parts[index] for index in sorted(parts))
            choice = self._update.decided(measured)._replace(parts=measured)
            for core in self.cores:
                assert core.commit(push.worker, choice)

    def _carry_out(self, shard_index: int, rng: random.Random) -> None:
        core, engine = self.cores[shard_index], self._engines[shard_index]
        effects = core.take_effects()
        for effect in effects:
            if isinstance(effect, Staged):
                parts = self._staged.setdefault(effect.push, {})
                parts[shard_index] = effect.choice
            elif isinstance(effect, MeasureClock):
                core.clock_measured(effect.choice, *measured_by(engine, effect))
        if effects:
            orders = [each for each in effects if isinstance(each, ApplyChunk)]
            rng.shuffle(orders)
            for order in orders:
                engine.apply(
                    order.chunk_index,
                    optimizer=order.optimizer,
                    contributions=with_bytes(order.contributions),
                    total_weight=order.total_weight,
                    hyperparameters=order.hyperparameters,
                    gradient_scale=order.gradient_scale,
                )
                core.chunk_applied(order.chunk_index)


def measured_by(
    engine: ApplyEngine, order: MeasureClock
) -> tuple[float, tuple[float, ...]]:
    """What a shard measures of its part."""
    if not order.measures_each:
        squares = (
            engine.sum_of_squares(
                index,
                optimizer=order.optimizer,
                contributions=with_bytes(parts),
                total_weight=order.total_weight,
            )
            for index, parts in order.chunks
        )
        return sum(squares), ()
    workers = [worker.worker_id for worker in order.choice.workers]
    count = len(workers)
    none = (0.0,) * (count * (count + 1) // 2 if order.measures_pairs else count)
    products = [
        engine.products(
            index,
            with_bytes(parts),
            workers,
            optimizer=order.optimizer,
            has_pairs=order.measures_pairs,
        )
        for index, parts in order.chunks
    ]
    return 0.0, tuple(map(sum, zip(none, *products, strict=True)))


@st.composite
def jobs(
    draw: st.DrawFn, names: Sequence[str] = ("a", "b", "c", "w10", "w2"), most: int = 4
) -> tuple[list[torch.Tensor], Clocks]:
    """First values, and for each clock a push of every worker."""
    sizes = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    names = draw(st.permutations(names))[: draw(st.integers(1, most))]
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
    update: UpdateRules = NOT_MEASURED,
) -> list[torch.Tensor]:
    first_values, clocks = job
    server = ShardedServer(
        first_values, optimizers, shards=shards, loss_is_sum=loss_is_sum, update=update
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


@st.composite
def rules(draw: st.DrawFn) -> DumbRules:
    """How pushes become updates: what the wire's rules say in other words."""
    rule = draw(
        st.sampled_from(("mean", "median", "trimmed-mean", "krum", "multi-krum"))
    )
    norm_max = draw(st.sampled_from((0.0, 1.5, 2.5)))
    is_coordinatewise = rule in ("median", "trimmed-mean")
    clip = 0.0 if is_coordinatewise and norm_max else draw(st.sampled_from((0.0, 0.7)))
    return DumbRules(
        rule=rule,
        share=draw(st.sampled_from((0.125, 0.25, 0.375))),
        f=draw(st.integers(1, 3)),
        norm_max=norm_max,
        clips=draw(st.booleans()),
        clip_grad_norm=clip,
    )


def as_of_the_wire(rules: DumbRules) -> UpdateRules:
    parameters = {
        "trimmed-mean": f":{rules.share}",
        "krum": f":f={rules.f}",
        "multi-krum": f":{rules.f}",
    }
    policy = BadGradientPolicy.CLIP if rules.clips else BadGradientPolicy.REJECT
    return UpdateRules(
        clip_grad_norm=rules.clip_grad_norm,
        gradient_norm_max=rules.norm_max,
        bad_gradients=policy,
        aggregation=Aggregation.parse(rules.rule + parameters.get(rules.rule, "")),
    )


MANY = ("a", "b", "c", "d", "w1", "w10", "w2", "w3", "x")


@settings(derandomize=True, deadline=None, max_examples=60)
@given(job=jobs(MANY, 9), shards=st.integers(1, 3), rules=rules())
def test_every_rule_equals_the_dumb_server(
    job: tuple[list[torch.Tensor], Clocks],
    shards: int,
    rules: DumbRules,
) -> None:
    first_values, clocks = job
    dumb = DumbServer(first_values, momentum, rules=rules)
    for pushes in clocks:
        dumb.step(sorted(pushes, key=lambda push: push.worker_id))

    update = as_of_the_wire(rules)
    ours = run(job, momentum, shards=shards, seed=1, update=update)
    for one, theirs in zip(ours, dumb.parameters, strict=True):
        exact = theirs.detach()
        scale = max(float(exact.abs().max()), 1.0)
        assert float((one - exact).abs().max()) <= RELATIVE_TOLERANCE * scale


@settings(derandomize=True, deadline=None, max_examples=20)
@given(job=jobs(MANY, 9), shards=st.integers(1, 3), rules=rules())
def test_with_every_rule_the_order_of_arrival_changes_no_bit(
    job: tuple[list[torch.Tensor], Clocks], shards: int, rules: DumbRules
) -> None:
    update = as_of_the_wire(rules)
    first, second = (
        run(job, momentum, shards=shards, seed=seed, update=update)
        for seed in (1, 1_000)
    )

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
