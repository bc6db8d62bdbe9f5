"""Shards in one thread beside the ordinary torch optimizer they must equal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from psserver.shard.tensors.apply_engine import AppliedChunk, ApplyEngine
from psserver.shard.tensors.contribution import Contribution
from pswire.job_terms import JobTerms
from pswire.optimizers import SUPPORTED, flatten_group
from pswire.placement import Chunk, place
from pswire.schema import (
    ElementType,
    ModelSchema,
    OptimizerSpec,
    ParameterGroup,
    SchemaEntry,
)
from pswire.torch_types import buffer_of, element_type_of, tensor_from_buffer

Gradients = Sequence[torch.Tensor | None]
"""Of each parameter; `None` as in torch."""


@dataclass(frozen=True)
class Push:
    """One worker's part of a clock."""

    worker_id: str
    weight: float
    gradients: Gradients


def schema_of(parameters: Sequence[torch.Tensor]) -> ModelSchema:
    return ModelSchema(
        tuple(
            SchemaEntry(
                name=f"p{position}",
                shape=tuple(each.shape),
                element_type=element_type_of(each.dtype),
            )
            for position, each in enumerate(parameters)
        )
    )


def spec_of(
    name: str, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> OptimizerSpec:
    class_name = type(optimizer).__name__
    index_of = {id(each): position for position, each in enumerate(parameters)}
    return OptimizerSpec(
        name=name,
        class_name=class_name,
        hyperparameter_names=SUPPORTED[class_name].names,
        groups=tuple(
            ParameterGroup(
                tuple(index_of[id(each)] for each in group["params"]),
                flatten_group(class_name, group, optimizer.defaults),
            )
            for group in optimizer.param_groups
        ),
    )


class Shards:
    """All shards of a job, fed as workers would."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        shard_count: int,
    ) -> None:
        self.schema = schema_of(parameters)
        self.placement = place(self.schema, shard_count)
        self.optimizers = optimizers
        self.terms = JobTerms(
            schema=self.schema,
            optimizers=tuple(
                spec_of(name, each, parameters) for name, each in optimizers.items()
            ),
        )
        self.engines = [
            ApplyEngine(self.terms, self.placement, shard_index)
            for shard_index in range(shard_count)
        ]
        self.first_values = [each.detach().clone() for each in parameters]
        for engine in self.engines:
            engine.begin_seed()
        for chunk in self.placement.chunks:
            _, data = self.gather(chunk, self.first_values)
            self.engines[chunk.shard_index].write_seed(chunk.index, data)
        for engine in self.engines:
            engine.commit_seed()

    def gather(
        self, chunk: Chunk, gradients: Gradients
    ) -> tuple[tuple[bool, ...], memoryview]:
        """Presence and bytes of a chunk, as a worker sends it."""
        parts = [
            None
            if (gradient := gradients[piece.entry_index]) is None
            else gradient.detach().reshape(-1)[piece.start : piece.stop]
            for piece in chunk.slices
        ]
        present = [part for part in parts if part is not None]
        data = buffer_of(torch.cat(present)) if present else memoryview(b"")
        return tuple(part is not None for part in parts), data

    def hyperparameters(self, name: str) -> list[tuple[float, ...]]:
        """Current values of the worker's optimizer."""
        optimizer = self.optimizers[name]
        return [
            flatten_group(type(optimizer).__name__, group, optimizer.defaults)
            for group in optimizer.param_groups
        ]

    def step(
        self, pushes: Sequence[Push], name: str = "optimizer"
    ) -> list[AppliedChunk]:
        """One clock: every chunk, its checks as at the edge."""
        return [self.apply(chunk, pushes, name) for chunk in self.placement.chunks]

    def apply(
        self, chunk: Chunk, pushes: Sequence[Push], name: str = "optimizer"
    ) -> AppliedChunk:
        engine = self.engines[chunk.shard_index]
        values = self.hyperparameters(name)
        engine.declared.check_hyperparameters(name, values)
        contributions = []
        for push in sorted(pushes, key=lambda each: each.worker_id):
            presence, data = self.gather(chunk, push.gradients)
            if any(presence):
                engine.check_chunk(chunk.index, presence, data.nbytes, optimizer=name)
                contributions.append(
                    Contribution(
                        worker_id=push.worker_id,
                        weight=push.weight,
                        presence=presence,
                        data=data,
                    )
                )
        return engine.apply(
            chunk.index,
            optimizer=name,
            contributions=contributions,
            total_weight=sum(push.weight for push in pushes),
            hyperparameters=values,
        )

    def values(self) -> list[torch.Tensor]:
        """What a worker pulls."""
        pulled = [
            torch.empty(entry.element_count, dtype=dtype_of(entry.element_type))
            for entry in self.schema.entries
        ]
        for chunk in self.placement.chunks:
            data = memoryview(self.engines[chunk.shard_index].vectors.read(chunk.index))
            flat = tensor_from_buffer(data, chunk.element_type)
            position = 0
            for piece in chunk.slices:
                following = position + piece.element_count
                pulled[piece.entry_index][piece.start : piece.stop] = flat[
                    position:following
                ]
                position = following
        return [
            flat.reshape(entry.shape)
            for flat, entry in zip(pulled, self.schema.entries, strict=True)
        ]

    def step_counts(self, entry_index: int, name: str = "optimizer") -> set[int]:
        """Updates of the parts of a parameter, over all shards."""
        return {
            count
            for engine in self.engines
            for count in engine.step_counts(name, entry_index)
        }

    def deviation(self, expected: Sequence[torch.Tensor]) -> float:
        """Largest difference over largest value, of the worst tensor.

        The largest value at the start or the end: a single element that ends beside
        zero has no relative accuracy, in one process neither.
        """
        worst = 0.0
        for ours, theirs, first in zip(
            self.values(), expected, self.first_values, strict=True
        ):
            if ours.numel():
                exact = theirs.detach().double()
                scale = torch.maximum(exact.abs().max(), first.double().abs().max())
                worst = max(worst, float((ours.double() - exact).abs().max() / scale))
        return worst

    @property
    def state_byte_count(self) -> int:
        return sum(engine.state_byte_count for engine in self.engines)


def dtype_of(element_type: ElementType) -> torch.dtype:
    return tensor_from_buffer(memoryview(b""), element_type).dtype


def step_in_one_process(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    pushes: Sequence[Push],
) -> None:
    """The same clock on the union batch, with the mean rounded once."""
    total = sum(push.weight for push in pushes)
    for position, parameter in enumerate(parameters):
        present = [
            gradient.double() * push.weight
            for push in pushes
            if (gradient := push.gradients[position]) is not None
        ]
        parameter.grad = (
            (sum(present[1:], present[0]) / total).to(parameter.dtype)
            if present
            else None
        )
    optimizer.step()
