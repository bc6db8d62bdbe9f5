"""Shards update rows as torch's own optimizers do with sparse gradients."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from psserver.shard.tensors.apply_engine import AppliedChunk, ApplyEngine
from psserver.shard.tensors.contribution import Contribution
from psserver.shard.tensors.delay_rules import DelayRules
from psserver.shard.tensors.sent_values import SentValues
from pswire.frames import RESPONSE_CHUNK_FIELD
from pswire.optimizer_states import ChunkState
from pswire.optimizers import flatten_group
from pswire.placement import Chunk, Slice
from pswire.reasons import Refusal
from pswire.torch_types import buffer_of
from tests.doubles.chunk_sizes import cut_into
from tests.doubles.promised_numbers import DEVIATION_MAX
from tests.unit.psserver.shard.tensors.shards import Push, Shards, spec_of

STEP_COUNT: Final = 30
SHAPES: Final = ((20, 7), (3,), (9, 2, 3), (5,))
TABLES: Final = (0, 2)
"""Which of them get sparse gradients."""

CASES: Final[list[tuple[str, dict[str, Any]]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5, "maximize": True}),
    ("SparseAdam", {"lr": 0.05}),
    ("SparseAdam", {"lr": 0.05, "betas": (0.5, 0.9), "maximize": True}),
]


small_chunks = cut_into(64, 256)
"""Cuts tables of a few hundred elements into chunks that cut rows."""


class SparseShards(Shards):
    """Shards that are sent rows, written down element by element."""

    def contribution(
        self, chunk: Chunk, push: Push, *, optimizer: str = "optimizer"
    ) -> Contribution:
        engine = self.engines[chunk.shard_index]
        numbers: list[int] = []
        elements: list[torch.Tensor] = []
        presence = []
        is_sparse = False
        for piece in chunk.slices:
            gradient = push.gradients[piece.entry_index]
            presence.append(gradient is not None)
            if gradient is None:
                continue
            if gradient.is_sparse:
                is_sparse = True
                rows, values = _rows_of(piece, gradient)
                numbers += [len(rows), *rows]
                elements += values
            else:
                numbers.append(-1)
                elements.append(gradient.reshape(-1)[piece.start : piece.stop])
        data = buffer_of(torch.cat(elements)) if elements else memoryview(b"")
        packed = b"".join(each.to_bytes(8, "little", signed=True) for each in numbers)
        rows_of_slices = engine.check_chunk(
            chunk.index,
            tuple(presence),
            data.nbytes,
            optimizer=optimizer,
            row_indices=memoryview(packed) if is_sparse else None,
        )
        return Contribution(
            worker_id=push.worker_id,
            weight=push.weight,
            presence=tuple(presence),
            data=data,
            rows=rows_of_slices,
        )

    def train(
        self, pushes: Sequence[Push], *, pulled: SentValues | None = None
    ) -> list[AppliedChunk]:
        """One clock."""
        applied = []
        for chunk in self.placement.chunks:
            contributions = [
                self.contribution(chunk, push)
                for push in sorted(pushes, key=lambda each: each.worker_id)
                if any(push.gradients[e.entry_index] is not None for e in chunk.slices)
            ]
            applied.append(
                self.engines[chunk.shard_index].apply(
                    chunk.index,
                    optimizer="optimizer",
                    contributions=contributions,
                    total_weight=sum(push.weight for push in pushes),
                    hyperparameters=self.hyperparameters("optimizer"),
                    pulled=pulled,
                )
            )
        return applied

    def state(self) -> list[ChunkState]:
        return [
            self.engines[chunk.shard_index].export_state("optimizer", chunk.index)
            for chunk in self.placement.chunks
        ]


def _rows_of(
    piece: Slice, gradient: torch.Tensor
) -> tuple[list[int], list[torch.Tensor]]:
    """Rows of a slice, and those of their elements that lie in it."""
    length = math.prod(gradient.shape[1:])
    rows, values = [], []
    for row, value in zip(
        gradient.indices()[0].tolist(), gradient.values(), strict=True
    ):
        start = max(row * length, piece.start)
        stop = min((row + 1) * length, piece.stop)
        if start < stop:
            rows.append(row)
            values.append(value.reshape(-1)[start - row * length : stop - row * length])
    return rows, values


def rows(
    generator: torch.Generator,
    shape: Sequence[int],
    count: int,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """A sparse gradient of some rows; none when `count` is 0."""
    chosen = torch.randperm(shape[0], generator=generator)[:count].sort().values
    values = torch.randn((count, *shape[1:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(
        chosen[None], values, tuple(shape), is_coalesced=True, check_invariants=True
    )


def make_parameters(
    generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape in SHAPES
    ]


def optimizer_over(
    class_name: str,
    parameters: Sequence[torch.nn.Parameter],
    **settings: Any,  # noqa: ANN401
) -> torch.optim.Optimizer:
    """Of all parameters, or of the tables where the class takes nothing else."""
    own = [
        each
        for index, each in enumerate(parameters)
        if class_name != "SparseAdam" or index in TABLES
    ]
    made: torch.optim.Optimizer = getattr(torch.optim, class_name)(own, **settings)
    return made


def gradients(
    generator: torch.Generator, class_name: str, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor | None]:
    """Sparse for the tables, at times without any row, and at times absent."""
    found: list[torch.Tensor | None] = []
    for index, shape in enumerate(SHAPES):
        draw = int(torch.randint(10, (1,), generator=generator))
        if index in TABLES:
            found.append(None if draw > 5 else rows(generator, shape, draw, dtype))
        elif class_name == "SparseAdam":
            found.append(None)
        else:
            found.append(torch.randn(shape, generator=generator).to(dtype))
    return found


def filled(push: Push) -> Push:
    """The same with zeros where no row is."""
    return replace(
        push,
        gradients=[
            each.to_dense() if each is not None and each.is_sparse else each
            for each in push.gradients
        ],
    )


def step_in_one_process(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    pushes: Sequence[Push],
) -> None:
    total = sum(push.weight for push in pushes)
    for index, parameter in enumerate(parameters):
        parts = [
            gradient.to(parameter.dtype) * (push.weight / total)
            for push in pushes
            if (gradient := push.gradients[index]) is not None
        ]
        parameter.grad = None
        if parts:
            summed = sum(parts[1:], parts[0])
            parameter.grad = summed.coalesce() if summed.is_sparse else summed
    optimizer.step()


@pytest.mark.parametrize("shard_count", [1, 3])
@pytest.mark.parametrize(("class_name", "settings"), CASES)
def test_rows_are_updated_as_in_one_process(
    class_name: str, settings: dict[str, Any], shard_count: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    parameters = make_parameters(generator)
    optimizer = optimizer_over(class_name, parameters, **settings)
    shards = SparseShards(parameters, {"optimizer": optimizer}, shard_count=shard_count)
    exact = [torch.nn.Parameter(each.detach().double()) for each in parameters]
    one = optimizer_over(class_name, exact, **settings)
    step_counts = dict.fromkeys(TABLES, 0)

    for _ in range(STEP_COUNT):
        pushes = [
            Push("w1", 3, gradients(generator, class_name)),
            Push("w0", 5, gradients(generator, class_name)),
        ]
        shards.train(pushes)
        step_in_one_process(one, exact, pushes)
        for index in TABLES:
            step_counts[index] += any(p.gradients[index] is not None for p in pushes)

    assert shards.deviation(exact) <= DEVIATION_MAX
    for index, count in step_counts.items():
        assert count < STEP_COUNT
        assert shards.step_counts(index) == {count}


@pytest.mark.parametrize("class_name", ["SGD", "Adagrad", "SparseAdam"])
def test_rows_of_16_bits_are_updated_on_master_values(class_name: str) -> None:
    generator = torch.Generator().manual_seed(6)
    parameters = make_parameters(generator, torch.bfloat16)
    optimizer = optimizer_over(class_name, parameters, lr=0.05)
    shards = SparseShards(parameters, {"optimizer": optimizer}, shard_count=2)
    exact = [torch.nn.Parameter(each.detach().double()) for each in parameters]
    one = optimizer_over(class_name, exact, lr=0.05)

    for _ in range(STEP_COUNT):
        pushes = [
            Push(name, 2, gradients(generator, class_name, torch.bfloat16))
            for name in ("w0", "w1")
        ]
        shards.train(pushes)
        step_in_one_process(one, exact, pushes)

    for ours, theirs in zip(shards.values(), exact, strict=True):
        # Only the last rounding, to 8 bits.
        torch.testing.assert_close(
            ours.double(), theirs.detach(), rtol=2.0**-8, atol=1e-6
        )


@pytest.mark.parametrize("class_name", ["SGD", "Adagrad", "SparseAdam"])
def test_what_is_in_no_row_keeps_its_bits(class_name: str) -> None:
    """torch adds sparse vectors to views at twice their offset: into a neighbour."""
    generator = torch.Generator().manual_seed(7)
    parameters = make_parameters(generator)
    optimizer = optimizer_over(class_name, parameters, lr=0.1)
    shards = SparseShards(parameters, {"optimizer": optimizer}, shard_count=1)
    touched = torch.tensor([3, 8])
    gradient = torch.sparse_coo_tensor(
        touched[None], torch.ones(2, 2, 3), SHAPES[2], is_coalesced=True
    )

    for _ in range(3):
        shards.train([Push("w0", 1, [None, None, gradient, None])])

    for index, (now, before) in enumerate(
        zip(shards.values(), parameters, strict=True)
    ):
        changed = (now != before.detach()).reshape(len(now), -1).any(1).nonzero()
        assert changed.flatten().tolist() == (touched.tolist() if index == 2 else [])


@pytest.mark.parametrize("class_name", ["Adagrad", "SparseAdam"])
def test_state_that_tables_shared_is_their_own_after_they_part(class_name: str) -> None:
    """Of one element each: such a sparse vector torch takes for coalesced."""
    generator = torch.Generator().manual_seed(13)
    shapes = ((4, 1), (6, 1), (2, 1))
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes
    ]
    optimizer = getattr(torch.optim, class_name)(parameters, lr=0.1)
    shards = SparseShards(parameters, {"optimizer": optimizer}, shard_count=1)
    assert len(shards.placement.chunks) == 1
    exact = [torch.nn.Parameter(each.detach().double()) for each in parameters]
    one = getattr(torch.optim, class_name)(exact, lr=0.1)

    for step in range(9):
        given: list[torch.Tensor | None] = [
            rows(generator, shape, 1) if step < 3 or step % 3 == index else None
            for index, shape in enumerate(shapes)
        ]
        push = Push("w0", 1, given)
        shards.train([push])
        step_in_one_process(one, exact, [push])

    assert shards.deviation(exact) <= DEVIATION_MAX


@pytest.mark.parametrize(
    ("class_name", "settings"),
    [("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.5}), ("Adagrad", {})],
)
def test_a_dense_contribution_makes_a_dense_mean(
    class_name: str, settings: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(8)
    parameters = make_parameters(generator)
    optimizer = optimizer_over(class_name, parameters, **settings)
    shards = SparseShards(parameters, {"optimizer": optimizer}, shard_count=2)
    exact = [torch.nn.Parameter(each.detach().double()) for each in parameters]
    one = optimizer_over(class_name, exact, **settings)

    for step in range(STEP_COUNT):
        first, second = (gradients(generator, class_name) for _ in range(2))
        if step % 3 == 1:  # A run of slices is treated in both ways by turns.
            first[0] = torch.randn(SHAPES[0], generator=generator)
        pushes = [Push("w0", 1, first), Push("w1", 3, second)]
        shards.train(pushes)
        # torch can't add a dense gradient to the momentum of a sparse one.
        step_in_one_process(one, exact, [filled(push) for push in pushes])

    assert shards.deviation(exact) <= DEVIATION_MAX


@pytest.mark.parametrize("class_name", ["SGD", "Adagrad"])
def test_a_decay_of_another_worker_meets_a_dense_gradient(class_name: str) -> None:
    """Its values count where it was there first; no worker with a decay sends rows."""
    generator = torch.Generator().manual_seed(9)
    parameters = make_parameters(generator)
    optimizer = optimizer_over(class_name, parameters, lr=0.1, weight_decay=0.1)
    shards = SparseShards(parameters, {"optimizer": optimizer}, shard_count=2)
    exact = [torch.nn.Parameter(each.detach().double()) for each in parameters]
    one = optimizer_over(class_name, exact, lr=0.1, weight_decay=0.1)

    for _ in range(5):
        push = Push("w0", 1, gradients(generator, class_name))
        shards.train([push])
        step_in_one_process(one, exact, [filled(push)])

    assert shards.deviation(exact) <= DEVIATION_MAX


def test_rows_that_are_not_finite_are_left_out_with_their_sender() -> None:
    generator = torch.Generator().manual_seed(10)
    parameters = make_parameters(generator)
    optimizer = optimizer_over("SparseAdam", parameters, lr=0.1)
    shards = SparseShards(parameters, {"optimizer": optimizer}, shard_count=1)
    alone = SparseShards(parameters, {"optimizer": optimizer}, shard_count=1)
    good = Push("w0", 1, [rows(generator, SHAPES[0], 9), None, None, None])
    bad = rows(generator, SHAPES[0], 9)
    bad.values().fill_(math.nan)

    applied = shards.train([good, Push("w1", 3, [bad, None, None, None])])

    alone.train([good])
    torn = {each.torn_worker_ids for each in applied if any(each.presence)}
    assert torn == {("w1",)}
    for ours, theirs in zip(shards.values(), alone.values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("class_name", ["SGD", "Adagrad"])
def test_the_delay_of_rows_is_compensated_as_that_of_zeros_between(
    class_name: str,
) -> None:
    generator = torch.Generator().manual_seed(11)
    parameters = make_parameters(generator)
    optimizer = optimizer_over(class_name, parameters, lr=0.1)
    sparse_sent, dense_sent = SentValues(), SentValues()
    sparse, dense = (
        SparseShards(parameters, {"optimizer": optimizer}, shard_count=1)
        for _ in range(2)
    )
    for shards, sent in ((sparse, sparse_sent), (dense, dense_sent)):
        engine = ApplyEngine(
            shards.terms,
            shards.placement,
            0,
            delay=DelayRules(compensation=0.5),
        )
        shards.engines[0] = engine
        sent.keep_copies(True)
        for chunk in shards.placement.chunks:
            engine.encode(chunk.index, RESPONSE_CHUNK_FIELD, reader=sent)

    for _ in range(4):
        push = Push("w0", 1, gradients(generator, class_name))
        sparse.train([push], pulled=sparse_sent)
        dense.train([filled(push)], pulled=dense_sent)

    assert sparse.deviation(dense.values()) <= DEVIATION_MAX
    uncompensated = SparseShards(parameters, {"optimizer": optimizer}, shard_count=1)
    assert sparse.deviation(uncompensated.values()) > 1e-3


@pytest.mark.parametrize(
    ("class_name", "settings"),
    [("SparseAdam", {}), ("Adagrad", {}), ("SGD", {"lr": 0.1, "momentum": 0.9})],
)
def test_training_goes_on_from_exported_state(
    class_name: str, settings: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(12)
    parameters = make_parameters(generator)
    optimizer = optimizer_over(class_name, parameters, **settings)
    shards = SparseShards(parameters, {"optimizer": optimizer}, shard_count=1)
    for _ in range(7):
        shards.train([Push("w0", 1, gradients(generator, class_name))])

    values = [torch.nn.Parameter(each) for each in shards.values()]
    again = optimizer_over(class_name, values, **settings)
    other = SparseShards(values, {"optimizer": again}, shard_count=1)
    states = {
        chunk.index: state
        for chunk, state in zip(shards.placement.chunks, shards.state(), strict=True)
    }
    for index, state in states.items():
        other.engines[0].check_state("optimizer", index, state)
    other.engines[0].load_state("optimizer", states)

    for _ in range(7):
        push = Push("w0", 1, gradients(generator, class_name))
        shards.train([push])
        other.train([push])

    assert all(map(torch.equal, shards.values(), other.values()))
    assert [
        {key: value.tolist() for key, value in state.items()}
        for state in shards.state()
    ] == [
        {key: value.tolist() for key, value in state.items()} for state in other.state()
    ]


def test_a_push_by_any_declaration_of_an_optimizer_is_let_in() -> None:
    """Its trailer says by which one it was made, and comes after its chunks perhaps."""
    generator = torch.Generator().manual_seed(14)
    parameters = make_parameters(generator)
    sparse = Push("w0", 1, [rows(generator, SHAPES[0], 2), None, None, None])
    adam = torch.optim.Adam([parameters[0]])
    shards = SparseShards(parameters, {"optimizer": adam}, shard_count=1)
    chunk = shards.placement.chunks[0]
    with pytest.raises(Refusal, match="is Adam: a slice of chunk 0 is sparse"):
        shards.contribution(chunk, sparse)

    sparse_adam = torch.optim.SparseAdam([parameters[0]])
    shards.engines[0].declare(spec_of("optimizer", sparse_adam, parameters))

    shards.contribution(chunk, sparse)
    shards.contribution(chunk, filled(sparse))


def test_hyperparameters_of_sparse_adam_travel() -> None:
    optimizer = torch.optim.SparseAdam([torch.zeros(1)], lr=0.5, maximize=True)
    values = flatten_group("SparseAdam", optimizer.param_groups[0], optimizer.defaults)
    assert values == (0.5, 0.9, 0.999, 1e-8, 1.0)
