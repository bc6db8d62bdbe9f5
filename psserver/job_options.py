"""Options of a job, which `psserver coordinator` and `psserver local` share.

Declared once, as the fields of a dataclass: a command takes them as one argument, and
`arguments` writes them down again for another process.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from psserver.config import (
    BACKUP_WORKER_COUNT,
    CHECKPOINT_KEEP_COUNT,
    CHUNK_KIB,
    DELAY_COMPENSATION,
    GRACE_WINDOW_S,
    GRADIENT_NORM_LIMIT,
    JOB_SEED,
    LEASE_TTL_S,
    QUORUM,
    SHARD_COUNT,
    STALENESS_BOUND,
    WORKERS_MIN,
    CoordinatorConfig,
    ListenConfig,
)
from psserver.edge.checkpoint_interval import EVERY_TEN_MINUTES, CheckpointInterval
from psserver.edge.coordinator_settings import (
    CHECKPOINT_KEEP_COUNT_DEFAULT,
    ShardLossPolicy,
)
from pswire.aggregation import EXAMPLES as AGGREGATION_EXAMPLES
from pswire.aggregation import MEAN, Aggregation, BadGradientPolicy
from pswire.config_options import switch_argument
from pswire.limits import (
    CHUNK_BYTES_ASKED_MIN,
    CHUNK_BYTES_MAX,
    VALUES_PART_BYTES,
)
from pswire.membership import (
    CLOCKED_MODES,
    UNCLOCKED_MODES,
    LossPolicy,
    Mode,
    StepAtomicity,
)
from pswire.options import (
    GRACE_WINDOW_HELP,
    MODES_TEXT,
    QUORUM_HELP,
    STALENESS_HELP,
    choice_option,
    declare_options,
    number_option,
)


def _interval_text(text: str) -> str:
    """An interval as `CheckpointInterval` writes it.

    Raises:
        typer.BadParameter: It is none.
    """
    try:
        return str(CheckpointInterval.parse(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _aggregation_text(text: str) -> str:
    """A rule as `Aggregation` writes it.

    Raises:
        typer.BadParameter: It is none.
    """
    try:
        return str(Aggregation.parse(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of a job as they were given; `CoordinatorConfig` says what they mean."""

    shards: Annotated[
        int,
        number_option(allowed=SHARD_COUNT, metavar="N", help="How many shards."),
    ]
    mode: Annotated[
        str,
        choice_option(
            Mode.labels(),
            help=f"How workers keep together: {MODES_TEXT}. `psctl mode` changes it "
            "while the job runs.",
        ),
    ] = Mode.BSP.label
    staleness: Annotated[
        int | None,
        number_option(allowed=STALENESS_BOUND, metavar="S", help=STALENESS_HELP),
    ] = None
    quorum: Annotated[
        int | None,
        number_option(allowed=QUORUM, metavar="K", help=QUORUM_HELP),
    ] = None
    grace_window: Annotated[
        float | None,
        number_option(
            allowed=GRACE_WINDOW_S, metavar="SECONDS", help=GRACE_WINDOW_HELP
        ),
    ] = None
    min_workers: Annotated[
        int,
        number_option(
            allowed=WORKERS_MIN,
            metavar="N",
            help="Workers the job waits for before its first clock. If fewer than "
            "these would be left, a lost worker is not evicted and the job waits.",
        ),
    ] = 1
    on_worker_loss: Annotated[
        str,
        choice_option(
            LossPolicy.labels(),
            help="After the loss of a worker: go on with those left, or wait until a "
            "process registers under its worker id, which continues the open clock.",
        ),
    ] = LossPolicy.CONTINUE.label
    on_shard_loss: Annotated[
        str | None,
        choice_option(
            ShardLossPolicy.labels(),
            help="After the loss of a shard: wait for a new one and return to the "
            "newest checkpoint in the same processes, or fail. With wait the first "
            "checkpoint is made when the job starts. By default it waits if there is a "
            "checkpoint.",
        ),
    ] = None
    step_atomicity: Annotated[
        str | None,
        choice_option(
            StepAtomicity.labels(),
            help="Apply each chunk of a step as soon as its gradients have arrived, or "
            "all of them when every shard has the whole clock, which takes a second "
            "round trip; `chunk` by default.",
        ),
    ] = None
    backup_workers: Annotated[
        int,
        number_option(
            allowed=BACKUP_WORKER_COUNT,
            metavar="B",
            help=f"With {Mode.BSP.label}, workers that a clock need not wait for; the "
            "pushes of the slowest ones are dropped.",
        ),
    ] = 0
    staleness_scaling: Annotated[
        bool,
        typer.Option(
            "--staleness-scaling",
            help=f"With {UNCLOCKED_MODES}, divide the learning rate of a push by its "
            "staleness.",
        ),
    ] = False
    delay_compensation: Annotated[
        float,
        number_option(
            allowed=DELAY_COMPENSATION,
            metavar="LAMBDA",
            help=f"With {UNCLOCKED_MODES}, correct a stale gradient by this strength "
            "for what has changed since its values (DC-ASGD); takes a copy of the "
            "parameters for each worker. 0 is none.",
        ),
    ] = 0.0
    aggregation: Annotated[
        str,
        typer.Option(
            parser=_aggregation_text,
            metavar="RULE",
            help=f"With {CLOCKED_MODES}, what the gradients of a clock become: "
            f"{AGGREGATION_EXAMPLES}. f workers may send anything.",
        ),
    ] = str(MEAN)
    gradient_norm_max: Annotated[
        float,
        number_option(
            allowed=GRADIENT_NORM_LIMIT,
            metavar="NORM",
            help="Largest norm of the gradient of one worker; of larger ones "
            "--on-bad-gradient says what happens. 0 is no limit.",
        ),
    ] = 0.0
    on_bad_gradient: Annotated[
        str | None,
        choice_option(
            BadGradientPolicy.labels(),
            help="What happens to a gradient that is not finite or larger than "
            "--gradient-norm-max: the step is skipped, its push is rejected and the "
            "others count, or it is clipped to that norm. By default rejected where "
            "there is such a norm or another rule than the mean, else skipped.",
        ),
    ] = None
    chunk_kib: Annotated[
        int | None,
        number_option(
            allowed=CHUNK_KIB,
            metavar="KIB",
            help="Size of the chunks in which the model is sent, updated and returned: "
            f"from {CHUNK_BYTES_ASKED_MIN >> 10} to {CHUNK_BYTES_MAX >> 10} KiB, at "
            f"most {VALUES_PART_BYTES >> 10} in a job that compresses. By default "
            "1024, and more for large models.",
        ),
    ] = None
    lease_ttl: Annotated[
        float,
        number_option(
            allowed=LEASE_TTL_S,
            metavar="SECONDS",
            help="Seconds within which a lost process is noticed, at least 1.",
        ),
    ] = 10.0
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|URL",
            help="Where to write checkpoints: a folder, or any URL that fsspec "
            "reaches, which the coordinator and all shards see under this name.",
        ),
    ] = None
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            parser=_interval_text,
            metavar="500steps|10min",
            help="With --checkpoint-dir, how often: after so many steps of all workers "
            f"together, or so much time; {EVERY_TEN_MINUTES} by default.",
        ),
    ] = None
    checkpoint_keep: Annotated[
        int | None,
        number_option(
            allowed=CHECKPOINT_KEEP_COUNT,
            metavar="N",
            help="With --checkpoint-dir, how many checkpoints stay; "
            f"{CHECKPOINT_KEEP_COUNT_DEFAULT} by default.",
        ),
    ] = None
    seed: Annotated[
        int,
        number_option(
            allowed=JOB_SEED,
            metavar="SEED",
            help="Seed of the data order; 0 leaves it to the workers' own samplers.",
        ),
    ] = 0

    def config(self, listen: ListenConfig, state_dir: Path) -> CoordinatorConfig:
        """The coordinator's settings; not validated yet."""
        atomicity = self.step_atomicity
        interval = self.checkpoint_every
        on_shard_loss = self.on_shard_loss
        return CoordinatorConfig(
            listen=listen,
            state_dir=state_dir,
            shard_count=self.shards,
            mode=Mode.labelled(self.mode),
            staleness_bound=self.staleness,
            quorum=self.quorum,
            grace_window_s=self.grace_window,
            workers_min=self.min_workers,
            worker_loss_policy=LossPolicy.labelled(self.on_worker_loss),
            shard_loss_policy=ShardLossPolicy.labelled(on_shard_loss)
            if on_shard_loss
            else None,
            step_atomicity=StepAtomicity.labelled(atomicity) if atomicity else None,
            backup_worker_count=self.backup_workers,
            is_staleness_scaled=self.staleness_scaling,
            delay_compensation=self.delay_compensation,
            aggregation=Aggregation.parse(self.aggregation),
            gradient_norm_max=self.gradient_norm_max,
            bad_gradient_policy=BadGradientPolicy.labelled(self.on_bad_gradient)
            if self.on_bad_gradient
            else None,
            chunk_kib=self.chunk_kib,
            lease_ttl_ms=round(self.lease_ttl * 1000),
            job_seed=self.seed,
            checkpoint_url=self.checkpoint_dir,
            checkpoint_interval=CheckpointInterval.parse(interval)
            if interval
            else None,
            checkpoint_keep_count=self.checkpoint_keep,
        )

    def arguments(self) -> list[str]:
        """The options again, for the command line of another process."""
        found = []
        for each in fields(self):
            value = getattr(self, each.name)
            option = f"--{each.name.replace('_', '-')}"
            if isinstance(value, bool):
                found.append(switch_argument(each.name, value))
            elif value is not None:
                found.append(f"{option}={value}")
        return found


_HINTS: Final = get_type_hints(JobOptions, include_extras=True)


def takes_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Lets a command take the options of a job as one argument, named `job`."""
    names = [each.name for each in fields(JobOptions)]

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:  # noqa: ANN401, as typer passes them
        job = JobOptions(**{name: arguments.pop(name) for name in names})
        command(job=job, **arguments)

    options = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=(
                inspect.Parameter.empty if each.default is MISSING else each.default
            ),
            annotation=_HINTS[each.name],
        )
        for each in fields(JobOptions)
    ]
    declare_options(wrapped, command, options, replaced="job")
    return wrapped
