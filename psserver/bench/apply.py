"""The shard's apply of one big vector, beside torch's fused Adam on the same one.

`python -m psserver.bench.apply NAME RANK SETTINGS`: see `psctl bench all`.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from psserver.config import usable_thread_count
from psserver.shard.daemon import SWITCH_INTERVAL_S
from psserver.shard.tensors.apply_engine import ApplyEngine
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
from pswire.torch_types import buffer_of, tensor_from_buffer

_OPTIMIZER: Final = "optimizer"
_TOLERANCE: Final = 1e-4
"""Of the values, over the largest one: chunks are rounded as one vector is."""


class ShardApply:
    """One shard with one parameter, updated chunk by chunk by the shard's threads.

    Attributes:
        terms: Of its job.
        placement: Its chunks.
        engine: What it holds.
    """

    def __init__(self, first: torch.Tensor, optimizer: torch.optim.Adam) -> None:
        """Takes the first values.

        Args:
            first: 1-D float32.
            optimizer: Whose hyperparameters are applied.
        """
        (group,) = optimizer.param_groups
        self._hyperparameters = [flatten_group("Adam", group, optimizer.defaults)]
        entry = SchemaEntry(
            name="weight", shape=(len(first),), element_type=ElementType.FLOAT32
        )
        schema = ModelSchema((entry,))
        spec = OptimizerSpec(
            name=_OPTIMIZER,
            class_name="Adam",
            hyperparameter_names=SUPPORTED["Adam"].names,
            groups=(ParameterGroup((0,), self._hyperparameters[0]),),
        )
        self.terms = JobTerms(schema=schema, optimizers=(spec,))
        self.placement = place(schema, 1)
        self.engine = ApplyEngine(self.terms, self.placement, 0)
        self.engine.begin_seed()
        for chunk in self.placement.chunks:
            self.engine.write_seed(chunk.index, buffer_of(_part(first, chunk)))
        self.engine.commit_seed()
        self._threads = ThreadPoolExecutor(usable_thread_count())

    def apply(self, gradient: torch.Tensor) -> None:
        def update(chunk: Chunk) -> None:
            contribution = Contribution(
                worker_id="w0",
                weight=1.0,
                presence=(True,),
                data=buffer_of(_part(gradient, chunk)),
            )
            self.engine.apply(
                chunk.index,
                optimizer=_OPTIMIZER,
                contributions=[contribution],
                total_weight=1.0,
                hyperparameters=self._hyperparameters,
            )

        for _ in self._threads.map(update, self.placement.chunks):
            pass

    def values(self) -> torch.Tensor:
        """The values, 1-D."""
        return torch.cat(
            [
                tensor_from_buffer(
                    memoryview(self.engine.vectors.read(chunk.index)),
                    chunk.element_type,
                )
                for chunk in self.placement.chunks
            ]
        )


def measure(element_count: int, repetition_count: int, warm_up_count: int) -> None:
    """Measures both in turn and prints the durations.

    Raises:
        AssertionError: They have computed different values.
    """
    machine_thread_count = torch.get_num_threads()
    # As the daemon does.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    first = torch.randn(element_count, generator=torch.Generator().manual_seed(0))
    gradient = torch.randn(element_count, generator=torch.Generator().manual_seed(1))
    parameter = torch.nn.Parameter(first.clone())
    parameter.grad = gradient
    fused = torch.optim.Adam([parameter], lr=1e-3, fused=True)
    shard = ShardApply(first, fused)

    def run_shard() -> None:
        shard.apply(gradient)

    def run_fused() -> None:
        fused.step()

    contenders = [("shard", 1, run_shard), ("fused", machine_thread_count, run_fused)]
    for repetition in range(-warm_up_count, repetition_count):
        # Each comes first equally often, as in `psctl.bench`.
        for name, thread_count, run in contenders[:: 1 if repetition % 2 else -1]:
            torch.set_num_threads(thread_count)
            began = time.perf_counter()
            run()
            seconds = time.perf_counter() - began
            if repetition >= 0:
                print(json.dumps({"contender": name, "seconds": seconds}), flush=True)
    apart = float((shard.values() - parameter.detach()).abs().max())
    scale = float(parameter.detach().abs().max())
    if not apart <= _TOLERANCE * scale:
        raise AssertionError(
            f"shard and fused computed different values, which is a bug: they are "
            f"{apart:g} apart, with values up to {scale:g}"
        )


def _part(vector: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    (piece,) = chunk.slices
    return vector[piece.start : piece.stop]


def main(settings_text: str) -> None:
    """Measures as `psctl bench all` says."""
    settings = json.loads(settings_text)
    sizes = settings["sizes"]
    measure(
        sizes["mebibyte_count"] * (1 << 20) // 4,
        sizes["repetition_count"],
        settings["warm_up_count"],
    )


if __name__ == "__main__":
    main(sys.argv[3])
