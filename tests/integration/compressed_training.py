"""Training with fewer bytes: the same script in one process and on a job.

The one process has plain torch and plain sums. It encodes gradients and values chunk by
chunk as the job does, with the encodings of `pswire`, which have tests of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from torch import nn

import psworker
from pswire.compression import Compression
from pswire.encodings.codec import Codec
from pswire.membership import Mode
from pswire.placement import Chunk, place
from psworker.optim.model_schema import bind_models
from tests.integration.job import Job, connect, run_workers

SEED: Final = 20261129
STEP_COUNT: Final = 12
BATCHES: Final = {"w0": 11, "w1": 5}
"""Samples of each worker in every step."""


def model_of(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of a few KiB.

    The sizes of its tensors are multiples of 32: what is left over of a vector is not
    rounded in the same way in a long tensor and in a short one.
    """
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model.to(dtype)


def backward(model: nn.Module, worker_id: str, step: int) -> None:
    """The gradient of a worker's samples of a step."""
    generator = torch.Generator().manual_seed(SEED + step)
    inputs = torch.randn(16, 16, generator=generator)
    targets = torch.randn(16, 32, generator=generator)
    first = BATCHES["w0"]
    rows = slice(0, first) if worker_id == "w0" else slice(first, None)
    dtype = next(model.parameters()).dtype
    model.zero_grad()
    outputs = model(inputs[rows].to(dtype))
    nn.functional.mse_loss(outputs, targets[rows].to(dtype)).backward()


def values_of(model: nn.Module) -> list[torch.Tensor]:
    """A copy of all values."""
    return [each.detach().clone() for each in model.parameters()]


def optimizer_of(model: nn.Module, kind: str = "SGD") -> torch.optim.Optimizer:
    """An optimizer with state."""
    if kind == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=0.01)


@dataclass
class OneProcess:
    """All workers and shards of a job in BSP, in plain sums.

    Attributes:
        compression: How bytes are saved.
        shard_count: Of the job.
        kind: Of the optimizer.
    """

    compression: Compression
    shard_count: int = 2
    kind: str = "SGD"
    exact: nn.Module = field(default_factory=lambda: model_of(0))
    seen: nn.Module = field(default_factory=lambda: model_of(0))

    def __post_init__(self) -> None:
        self.optimizer = optimizer_of(self.exact, self.kind)
        schema = bind_models({"model": self.exact}).schema
        self.chunks = place(schema, self.shard_count).chunks
        self.left: dict[tuple[str, int], torch.Tensor] = {}
        ratio = self.compression.ratio
        push, pull = self.compression.push_encoding, self.compression.pull_encoding
        self.push = push.codec(ratio) if push else None
        self.pull = pull.codec(ratio) if pull else None
        self.keeps_residual = push is not None and push.keeps_residual
        self.are_changes = pull is not None and pull.sends_changes

    def train(self, step_count: int = STEP_COUNT) -> None:
        for step in range(step_count):
            self.step(step)

    def step(self, step: int) -> None:
        gradients = {
            worker_id: self.sent_gradients(worker_id, step) for worker_id in BATCHES
        }
        total = sum(BATCHES.values())
        for index, chunk in enumerate(self.chunks):
            mean = torch.zeros(chunk.element_count)
            for worker_id, parts in gradients.items():
                # As one operation, which torch rounds once.
                mean.add_(parts[index], alpha=BATCHES[worker_id] / total)
            self.write(chunk, mean, [each.grad for each in self.exact.parameters()])
        self.optimizer.step()
        for chunk in self.chunks:
            exact = self.read(chunk, list(self.exact.parameters()))
            known = self.read(chunk, list(self.seen.parameters()))
            if self.pull is None:
                known = exact
            elif self.are_changes:
                known = known + round_trip(self.pull, exact - known, None)
            else:
                known = round_trip(self.pull, exact, None)
            self.write(chunk, known, list(self.seen.parameters()))

    def sent_gradients(self, worker_id: str, step: int) -> list[torch.Tensor]:
        """What the shards get of a worker's gradient, by chunk."""
        backward(self.seen, worker_id, step)
        for mine in self.exact.parameters():
            mine.grad = torch.zeros_like(mine)
        return [self.sent_gradient(worker_id, step, chunk) for chunk in self.chunks]

    def sent_gradient(self, worker_id: str, step: int, chunk: Chunk) -> torch.Tensor:
        values = self.read(chunk, [each.grad for each in self.seen.parameters()])
        if self.push is None:
            return values
        place = (worker_id, chunk.index)
        if self.keeps_residual and place in self.left:
            values = values + self.left[place]
        text = f"{worker_id} {step + 1} {chunk.index}"
        sent = round_trip(self.push, values, xxhash.xxh3_64_intdigest(text.encode()))
        self.left[place] = values - sent
        return sent

    @staticmethod
    def read(chunk: Chunk, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return torch.cat(
            [
                _tensor(tensors, piece.entry_index)[piece.start : piece.stop]
                for piece in chunk.slices
            ]
        ).float()

    @staticmethod
    def write(
        chunk: Chunk, values: torch.Tensor, tensors: Sequence[torch.Tensor | None]
    ) -> None:
        parts = values.split([piece.element_count for piece in chunk.slices])
        for piece, part in zip(chunk.slices, parts, strict=True):
            _tensor(tensors, piece.entry_index)[piece.start : piece.stop] = part


def _tensor(tensors: Sequence[torch.Tensor | None], index: int) -> torch.Tensor:
    tensor = tensors[index]
    assert tensor is not None
    return tensor.detach().view(-1)


def round_trip(codec: Codec, values: torch.Tensor, seed: int | None) -> torch.Tensor:
    data = codec.encode(values.contiguous(), seed=seed)
    return codec.decode(memoryview(data), values.numel())


@dataclass(frozen=True)
class OnJob:
    """What a job made of the same training.

    Attributes:
        workers: Values in each worker's model.
        shards: Those that the shards hold.
        version: Of these.
        bytes_sent: By each worker, after it has joined.
        bytes_received: By each worker, after it has joined.
    """

    workers: dict[str, list[torch.Tensor]]
    shards: list[torch.Tensor]
    version: int
    bytes_sent: dict[str, int]
    bytes_received: dict[str, int]


def on_job(
    folder: Path,
    compression: Compression | str | None,
    *,
    kind: str = "SGD",
    overlap: bool = False,
    dtype: torch.dtype = torch.float32,
    mode: Mode = Mode.BSP,
    shard_count: int = 2,
    step_count: int = STEP_COUNT,
    clip_grad_norm: float | None = None,
    before_step: Callable[[str, int], None] = lambda worker_id, step: None,
    **settings: Any,  # noqa: ANN401, as the coordinator has them
) -> OnJob:
    """Trains as two workers.

    Args:
        folder: For the daemons' state.
        compression: As for `prepare`.
        kind: Of the optimizer.
        overlap: As for `prepare`.
        dtype: Of the parameters.
        mode: Of the job.
        shard_count: Shards.
        step_count: Steps of each worker.
        clip_grad_norm: As for `prepare`.
        before_step: Called by each worker before each backward pass.
        settings: Further ones of the coordinator.
    """
    sent: dict[str, int] = {}
    received: dict[str, int] = {}

    def work(worker_id: str) -> list[torch.Tensor]:
        with connect(job, worker_id) as ps:
            model = model_of(0 if worker_id == "w0" else 1, dtype)
            model, optimizer = ps.prepare(
                model,
                optimizer_of(model, kind),
                compression=compression,
                overlap=overlap,
                clip_grad_norm=clip_grad_norm,
            )
            before = ps.bytes_sent, ps.bytes_received
            for step in range(step_count):
                before_step(worker_id, step)
                backward(model, worker_id, step)
                optimizer.step(weight=BATCHES[worker_id])
            ps.wait()
            sent[worker_id] = ps.bytes_sent - before[0]
            received[worker_id] = ps.bytes_received - before[1]
            return values_of(model)

    with Job(
        folder,
        shard_count=shard_count,
        workers_min=2,
        mode=mode,
        **settings,
    ) as job:
        workers = run_workers(dict.fromkeys(BATCHES, work))
        with psworker.SnapshotReader(job.address) as reader:
            snapshot = reader.latest()
            shards = list(snapshot.state_dict().values())
    return OnJob(workers, shards, snapshot.version, sent, received)
