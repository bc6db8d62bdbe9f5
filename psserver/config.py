"""Settings of the daemons, built once from the command line."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from psserver.edge.checkpoint_interval import EVERY_TEN_MINUTES, CheckpointInterval
from psserver.edge.coordinator_settings import (
    CHECKPOINT_KEEP_COUNT_DEFAULT,
    CheckpointSettings,
    CoordinatorSettings,
    ShardLossPolicy,
)
from psserver.edge.limits import DEFAULT_LIMITS, Limits
from pswire.addresses import Address
from pswire.aggregation import MEAN, Aggregation, BadGradientPolicy
from pswire.keepalive import reconnect_grace_ms
from pswire.limits import (
    CHUNK_BYTES_ASKED_MIN,
    CHUNK_BYTES_MAX,
    GRACE_WINDOW_MS_MAX,
    GRADIENT_NORM_MAX,
    NUMBER_MAX,
    QUORUM_DEFAULT,
    SHARD_COUNT_MAX,
    STALENESS_BOUND_DEFAULT,
    STALENESS_BOUND_MAX,
    WORKER_COUNT_MAX,
)
from pswire.membership import (
    BOUNDED_MODES,
    CLOCKED_MODES,
    FREE_MODES,
    QUORUM_MODES,
    LossPolicy,
    Mode,
    ModeTerms,
    StepAtomicity,
    modes_that,
)
from pswire.number_range import NumberRange
from pswire.security.credentials import Credentials
from pswire.shared_memory.segments import SHARED_MEMORY_VARIABLE, is_wanted

LEASE_TTL_S = NumberRange(
    1.0,
    24 * 3600.0,
    unit="seconds",
    why="in less than a second a ping, its time-out and the time to reconnect (600 ms) "
    "leave no room for a busy machine, and a process that nobody misses for a day is "
    "none that others wait for; 1 finds a lost process soonest, 10 forgives more",
)
SHARD_COUNT = NumberRange(1, SHARD_COUNT_MAX)
SHARD_INDEX = NumberRange(0, SHARD_COUNT_MAX - 1)
WORKERS_MIN = NumberRange(1, WORKER_COUNT_MAX)
BACKUP_WORKER_COUNT = NumberRange(0, WORKER_COUNT_MAX)
STALENESS_BOUND = NumberRange(
    0,
    STALENESS_BOUND_MAX,
    why=f"with --mode {FREE_MODES} there is no bound at all",
)
QUORUM = NumberRange(1, WORKER_COUNT_MAX)
GRACE_WINDOW_S = NumberRange(
    0.0,
    GRACE_WINDOW_MS_MAX / 1000,
    unit="seconds",
    why="who wants to wait for all says so by the quorum",
)
DELAY_COMPENSATION = NumberRange(
    0.0, 1e6, why="give a strength such as 0.04; 0 is none"
)
CHUNK_KIB = NumberRange(
    CHUNK_BYTES_ASKED_MIN >> 10,
    CHUNK_BYTES_MAX >> 10,
    why="smaller chunks cost more than their bytes, and larger ones leave too few that "
    "are sent, updated and answered at the same time; leave it out for the size that "
    "suits the model",
)
CHECKPOINT_KEEP_COUNT = NumberRange(
    1, 100_000, why="the newest one is what a job goes on from"
)
GRADIENT_NORM_LIMIT = NumberRange(
    0.0, GRADIENT_NORM_MAX, why="0 is no limit; larger ones are never finite"
)
JOB_SEED = NumberRange(0, NUMBER_MAX, why="0 leaves the order to the workers")
THREAD_COUNT = NumberRange(1, 1024)
RECORD_GIB = NumberRange(
    0.001, 1 << 20, unit="GiB", why="leave out --record to record nothing"
)
RECORD_GIB_DEFAULT = 64.0
"""Size of a recording at which it ends: all of a small job, a minute or more of a large
one, and no disk that a shard's checkpoints fit is full by it."""


class ConfigurationError(ValueError):
    """A setting is wrong; the text says which, why and what to do."""


class OptionError(ConfigurationError):
    """An option is wrong, alone or beside others, whatever the machine is like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where a daemon listens.

    Attributes:
        address: Port 0 means any free port.
        insecure: Whether it may listen beyond loopback although not all protects it.
        credentials: What it proves itself with, and others are checked by.
        tokens: File of the tokens that callers may show, None for no such file.
        asks_certificates: Whether the authority's certificates say who calls, too.
        option: By which the address is given.
    """

    address: Address
    insecure: bool = False
    credentials: Credentials = field(default_factory=Credentials)
    tokens: Path | None = None
    asks_certificates: bool = True
    option: str = "--listen"

    def admin(self, address: Address) -> Self:
        """Where the same daemon has its admin port, with the same protection.

        No browser or probe shows a certificate.
        """
        return replace(
            self, address=address, asks_certificates=False, option="--admin-listen"
        )

    @property
    def demands_certificates(self) -> bool:
        """Whether whoever connects must show a certificate of the job's authority.

        With tokens those say who calls: gRPC for Python demands certificates of all
        or of nobody.
        """
        tls = self.credentials.tls
        return (
            self.asks_certificates
            and tls is not None
            and tls.ca is not None
            and self.tokens is None
        )

    @property
    def missing_protection(self) -> str:
        """What is missing where other machines reach it; empty for nothing."""
        if self.address.is_loopback:
            return ""
        missing = []
        if self.credentials.tls is None:
            missing.append("encryption")
        if self.tokens is None and not self.demands_certificates:
            missing.append("authentication")
        return " or ".join(missing)

    @property
    def exposure(self) -> str:
        """What others can do for want of it; empty for nothing."""
        if "authentication" in self.missing_protection:
            power = "write to the model" if self.asks_certificates else "change the job"
            return f"anyone who reaches this port can {power}"
        if self.missing_protection:
            return "whoever sees its packets has the tokens that are in them"
        return ""

    def validate(self) -> None:
        """Refuses to open an unprotected port to the network by accident.

        Raises:
            OptionError: See above.
        """
        tls = self.credentials.tls
        if tls is not None and tls.certificate is None:
            raise OptionError(
                "--tls-ca is there without --tls-cert and --tls-key: a server shows a "
                "certificate of its own, such as `psctl tls init` makes; give all three"
            )
        if self.missing_protection and not self.insecure:
            raise OptionError(
                f"{self.option} {self.address} can be reached by other machines, "
                f"without {self.missing_protection}: {self.exposure}; give --tls-ca, "
                "--tls-cert and --tls-key, as `psctl tls init` makes them"
                f"{'' if self.asks_certificates else ', and --tokens'}, listen on "
                "127.0.0.1, or say --insecure on a network that you trust"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Settings of a coordinator.

    Attributes:
        listen: Where it listens.
        admin: Its admin port, None for none.
        state_dir: Folder of its durable state.
        shard_count: Shards of the job.
        mode: How workers keep together.
        staleness_bound: Largest staleness in SSP, in clocks; None for the default.
        quorum: Pushes that close a clock in mode quorum; None for the default.
        grace_window_s: How much longer it waits for more; None for not at all.
        workers_min: Workers that must be there before the first clock.
        worker_loss_policy: What to do when a worker is lost.
        shard_loss_policy: What to do when a shard is lost; None to return to a
            checkpoint if there is one, and to fail else.
        step_atomicity: When a push is applied; None for what the rest needs.
        backup_worker_count: In BSP, workers that a clock need not wait for.
        is_staleness_scaled: Whether the learning rate of a push is divided by its
            staleness, in SSP and ASP.
        delay_compensation: Strength of delay compensation in SSP and ASP, 0 for none.
        aggregation: What the gradients of a clock become.
        gradient_norm_max: Largest norm of the gradient of one worker, 0 for any.
        bad_gradient_policy: What becomes of a gradient that is larger or not finite;
            None for what suits the rest.
        chunk_kib: KiB of a full chunk; None for what suits the model.
        lease_ttl_ms: Bound on the detection of a lost process. Shorter finds it
            sooner, and takes slow machines for dead ones.
        job_seed: From which the seeds of all epochs follow; 0 for none: the orders
            of data are those that the workers draw.
        checkpoint_url: Folder of the job's checkpoints: a path or an fsspec URL; None
            for a job that makes none.
        checkpoint_interval: How often one is made; None for the default.
        checkpoint_keep_count: How many stay; None for the default.
        history: Where it writes its history, see `pswire.history`; empty for none.
        limits: What callers may make it hold.
    """

    listen: ListenConfig
    state_dir: Path
    shard_count: int
    mode: Mode = Mode.BSP
    staleness_bound: int | None = None
    quorum: int | None = None
    grace_window_s: float | None = None
    workers_min: int = 1
    worker_loss_policy: LossPolicy = LossPolicy.CONTINUE
    shard_loss_policy: ShardLossPolicy | None = None
    step_atomicity: StepAtomicity | None = None
    backup_worker_count: int = 0
    is_staleness_scaled: bool = False
    delay_compensation: float = 0.0
    aggregation: Aggregation = MEAN
    gradient_norm_max: float = 0.0
    bad_gradient_policy: BadGradientPolicy | None = None
    chunk_kib: int | None = None
    lease_ttl_ms: int = 10_000
    job_seed: int = 0
    checkpoint_url: str | None = None
    checkpoint_interval: CheckpointInterval | None = None
    checkpoint_keep_count: int | None = None
    history: str = ""
    limits: Limits = DEFAULT_LIMITS
    admin: ListenConfig | None = None

    def validate(self) -> None:
        """Checks every setting.

        Raises:
            OptionError: The first one that is wrong.
        """
        self.listen.validate()
        if self.admin is not None:
            self.admin.validate()
        _check("--shards", SHARD_COUNT, self.shard_count)
        _check("--min-workers", WORKERS_MIN, self.workers_min)
        _check("--lease-ttl", LEASE_TTL_S, self.lease_ttl_ms / 1000)
        _check("--seed", JOB_SEED, self.job_seed)
        if self.chunk_kib is not None:
            _check("--chunk-kib", CHUNK_KIB, self.chunk_kib)
        self._validate_staleness()
        self._validate_quorum()
        self._validate_two_phases()
        self._validate_aggregation()
        self._validate_checkpoints()

    def job_settings(self, *, job_id: str, job_seed: int) -> CoordinatorSettings:
        """The settings of the job, with what they switch on."""
        terms = self._terms
        return CoordinatorSettings(
            job_id=job_id,
            shard_count=self.shard_count,
            mode=self.mode,
            staleness_bound=terms.staleness_bound,
            quorum=terms.quorum,
            grace_window_ms=terms.grace_window_ms,
            workers_min=self.workers_min,
            lease_ttl_ms=self.lease_ttl_ms,
            reconnect_grace_ms=reconnect_grace_ms(self.lease_ttl_ms),
            job_seed=job_seed,
            worker_loss_policy=self.worker_loss_policy,
            step_atomicity=self._atomicity,
            backup_worker_count=self.backup_worker_count,
            is_staleness_scaled=self.is_staleness_scaled,
            delay_compensation=self.delay_compensation,
            aggregation=self.aggregation,
            gradient_norm_max=self.gradient_norm_max,
            bad_gradient_policy=self._bad_gradient_policy,
            chunk_bytes=(self.chunk_kib or 0) << 10,
            checkpoints=self._checkpoints,
            shard_loss_policy=self.shard_loss_policy,
        )

    def notes(self) -> tuple[str, ...]:
        """What follows from the settings and was not said, for the log."""
        found = []
        if self.mode.rules.takes_bound and self.staleness_bound is None:
            found.append(
                f"no --staleness: workers may be {STALENESS_BOUND_DEFAULT} clocks apart"
            )
        if self.mode.rules.has_quorum and self.quorum is None:
            found.append(
                "no --quorum: each clock closes with the first push, so that nobody "
                "waits for anybody"
            )
        if self.step_atomicity is None and self._needs_two_phases:
            found.append(
                f"{' and '.join(self._needs_two_phases)} switched --step-atomicity "
                "clock on: a step takes two round trips, and nothing of it is applied "
                "before every shard has all of it"
            )
        if self.gradient_norm_max and self.step_atomicity is not StepAtomicity.CLOCK:
            found.append(
                f"--gradient-norm-max {self.gradient_norm_max:g} makes steps of "
                f"{CLOCKED_MODES} two-phase: the norm of a gradient is known only when "
                "every shard has all of it"
            )
        if self.aggregation.rule.selects or self.aggregation.rule.is_radial:
            found.append(
                f"--aggregation {self.aggregation} makes steps two-phase: how far "
                "gradients are from each other is known only when every shard has all "
                "of them"
            )
        ruled = self._of_stale_pushes
        if self.mode.rules.is_clocked and ruled:
            others = modes_that(lambda rules: not rules.is_clocked, "` or `")
            found.append(
                f"{' and '.join(ruled)} has no effect in {self.mode.label}, where no "
                f"push is stale; `psctl mode {others}` gives it one"
            )
        return tuple(found)

    @property
    def _terms(self) -> ModeTerms:
        bound, quorum = self.staleness_bound, self.quorum
        return ModeTerms.of(
            self.mode,
            staleness_bound=STALENESS_BOUND_DEFAULT if bound is None else bound,
            quorum=QUORUM_DEFAULT if quorum is None else quorum,
            grace_window_ms=round((self.grace_window_s or 0) * 1000),
        )

    @property
    def _atomicity(self) -> StepAtomicity:
        if self.step_atomicity is not None:
            return self.step_atomicity
        return StepAtomicity.CLOCK if self._needs_two_phases else StepAtomicity.CHUNK

    @property
    def _bad_gradient_policy(self) -> BadGradientPolicy:
        if self.bad_gradient_policy is not None:
            return self.bad_gradient_policy
        # Whom nobody trusts must not be able to stop the others.
        is_guarded = self.gradient_norm_max > 0 or self.aggregation.is_robust
        return BadGradientPolicy.REJECT if is_guarded else BadGradientPolicy.SKIP

    @property
    def _checkpoints(self) -> CheckpointSettings | None:
        url = self.checkpoint_url
        if url is None:
            return None
        protocol, _, path = url.rpartition("://")
        if protocol in ("", "file", "local"):
            # Shards may have other working directories.
            url = str(Path(path).expanduser().absolute())
        return CheckpointSettings(
            url=url,
            interval=self.checkpoint_interval or EVERY_TEN_MINUTES,
            keep_count=self.checkpoint_keep_count or CHECKPOINT_KEEP_COUNT_DEFAULT,
        )

    @property
    def _needs_two_phases(self) -> tuple[str, ...]:
        """Options that can't do without two-phase steps, as they were given."""
        found = []
        if self.worker_loss_policy is LossPolicy.WAIT:
            found.append("--on-worker-loss wait")
        if self.backup_worker_count:
            found.append(f"--backup-workers {self.backup_worker_count}")
        return tuple(found)

    @property
    def _of_stale_pushes(self) -> tuple[str, ...]:
        """Options about stale pushes, as they were given."""
        found = []
        if self.is_staleness_scaled:
            found.append("--staleness-scaling")
        if self.delay_compensation:
            found.append(f"--delay-compensation {self.delay_compensation:g}")
        return tuple(found)

    def _validate_staleness(self) -> None:
        bound = self.staleness_bound
        if bound is not None and not self.mode.rules.takes_bound:
            raise OptionError(
                f"--staleness {bound} has no meaning with --mode "
                f"{self.mode.label}: only {BOUNDED_MODES} bounds how far workers are "
                f"apart; leave it out, or say --mode {BOUNDED_MODES}"
            )
        if bound is not None:
            _check("--staleness", STALENESS_BOUND, bound)
        _check("--delay-compensation", DELAY_COMPENSATION, self.delay_compensation)

    def _validate_quorum(self) -> None:
        for option, allowed, value in (
            ("--quorum", QUORUM, self.quorum),
            ("--grace-window", GRACE_WINDOW_S, self.grace_window_s),
        ):
            if value is None:
                continue
            if not self.mode.rules.has_quorum:
                raise OptionError(
                    f"{option} {value:g} has no meaning with --mode "
                    f"{self.mode.label}: only {QUORUM_MODES} closes a clock by a "
                    f"quorum; leave it out, or say --mode {QUORUM_MODES}"
                )
            _check(option, allowed, value)

    def _validate_checkpoints(self) -> None:
        keep_count = self.checkpoint_keep_count
        if keep_count is not None:
            _check("--checkpoint-keep", CHECKPOINT_KEEP_COUNT, keep_count)
        if self.checkpoint_url is not None:
            self._validate_checkpoint_url(self.checkpoint_url)
            return
        if self.shard_loss_policy is ShardLossPolicy.WAIT:
            raise OptionError(
                "--on-shard-loss wait can't go without --checkpoint-dir: the values of "
                "a shard that is lost are gone, and the one that takes its place has "
                "them from a checkpoint alone; say where checkpoints shall go, or "
                "leave it out"
            )
        for option, value in (
            ("--checkpoint-every", self.checkpoint_interval),
            ("--checkpoint-keep", keep_count),
        ):
            if value is not None:
                raise OptionError(
                    f"{option} {value} has no meaning without --checkpoint-dir: say "
                    "where checkpoints shall go, or leave it out"
                )

    def _validate_checkpoint_url(self, url: str) -> None:
        """Refuses what names no place, or one that no two processes share."""
        protocol, _, path = url.rpartition("://")
        if not path.strip():
            raise OptionError(
                f"--checkpoint-dir {url!r} names no folder: give a path or a URL, or "
                "leave it out"
            )
        if protocol == "memory":
            raise OptionError(
                f"--checkpoint-dir {url} is the memory of one process, and the "
                "coordinator and all shards write there: give a folder, or a URL of "
                "a store that they share"
            )

    def _validate_aggregation(self) -> None:
        _check("--gradient-norm-max", GRADIENT_NORM_LIMIT, self.gradient_norm_max)
        policy = self.bad_gradient_policy
        if policy is BadGradientPolicy.CLIP and not self.gradient_norm_max:
            raise OptionError(
                "--on-bad-gradient clip has no meaning without --gradient-norm-max: "
                "say to which norm, or leave it out"
            )
        if not self.aggregation.is_robust:
            return
        option = f"--aggregation {self.aggregation}"
        if not self.mode.rules.is_clocked:
            raise OptionError(
                f"{option} can't go with --mode {self.mode.label}: it takes the "
                "gradients of several workers, and there each is applied by itself; "
                f"leave it out, or say --mode {CLOCKED_MODES}"
            )
        size, said = self._pushes_min
        if size < self.aggregation.members_min:
            raise OptionError(
                f"{option} tolerates {self.aggregation.f} bad workers among at least "
                f"2f + 3 = {self.aggregation.members_min}, and {said}: raise it, or "
                "take a smaller f"
            )

    @property
    def _pushes_min(self) -> tuple[int, str]:
        """Pushes that each clock has at least, and which option says so."""
        workers, backups = self.workers_min, self.backup_worker_count
        if backups:
            left = workers - backups
            with_backups = f"{left} with --backup-workers {backups}"
            return left, f"--min-workers {workers} leaves {with_backups}"
        quorum = self._terms.quorum
        if self.mode.rules.has_quorum and quorum < workers:
            return quorum, f"--quorum is {quorum}"
        return workers, f"--min-workers is {workers}"

    def _validate_two_phases(self) -> None:
        count = self.backup_worker_count
        _check("--backup-workers", BACKUP_WORKER_COUNT, count)
        if count and not self.mode.rules.is_clocked:
            raise OptionError(
                f"--backup-workers {count} has no meaning with --mode "
                f"{self.mode.label}: there no worker waits for the slowest ones "
                f"of a clock; leave it out, or say --mode {Mode.BSP.label}"
            )
        if count and self.mode.rules.has_quorum:
            raise OptionError(
                f"--backup-workers {count} has no effect with --mode "
                f"{self.mode.label}: there --quorum says how many pushes a clock waits "
                "for, and all others may be late; leave it out and say --quorum, or "
                f"say --mode {Mode.BSP.label}"
            )
        needed_by = self._needs_two_phases
        if self.step_atomicity is StepAtomicity.CHUNK and needed_by:
            raise OptionError(
                f"--step-atomicity chunk can't go with {' and '.join(needed_by)}: what "
                "is applied of a clock that is open can't be taken back; leave out one "
                "of them, or say --step-atomicity clock"
            )


def _check(option: str, allowed: NumberRange, value: float) -> None:
    problem = allowed.problem(value)
    if problem:
        raise OptionError(f"{option} {problem}")


def usable_thread_count() -> int:
    """Threads that apply updates in a shard, if nobody says how many."""
    return min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """Settings of a shard.

    Attributes:
        listen: Where it listens.
        admin: Its admin port, None for none.
        coordinator: Where the coordinator is.
        advertise: Where workers reach it; None for where it listens.
        state_dir: Folder of its durable state.
        index: Place in the job that it asks for, and gets if it is free; None for any.
        thread_count: Threads that apply updates.
        history: Where it writes its history, see `pswire.history`; empty for none.
        record: Folder of its recordings for a replay; None for none.
        record_gib_max: Size at which a recording ends.
        shares_memory: Whether tensors of workers on this machine go through memory that
            both use, `PS_SHARED_MEMORY` if it is not said.
        limits: What callers may make it hold.
    """

    listen: ListenConfig
    coordinator: Address
    advertise: Address | None
    state_dir: Path
    index: int | None = None
    thread_count: int = field(default_factory=usable_thread_count)
    history: str = ""
    record: Path | None = None
    record_gib_max: float = RECORD_GIB_DEFAULT
    shares_memory: bool = field(
        default_factory=lambda: is_wanted(os.environ.get(SHARED_MEMORY_VARIABLE, "1"))
    )
    limits: Limits = DEFAULT_LIMITS
    admin: ListenConfig | None = None

    def validate(self) -> None:
        """Checks every setting.

        Raises:
            OptionError: The first one that is wrong.
        """
        self.listen.validate()
        if self.admin is not None:
            self.admin.validate()
        if self.listen.address.is_unspecified and self.advertise is None:
            raise OptionError(
                f"--listen {self.listen.address} is every address of this machine: "
                "say with --advertise HOST:PORT which one workers shall use"
            )
        _check("--threads", THREAD_COUNT, self.thread_count)
        _check("--record-limit", RECORD_GIB, self.record_gib_max)
        if self.index is not None:
            _check("--index", SHARD_INDEX, self.index)

    @property
    def unreachable_text(self) -> str:
        """What the log says if workers on other machines can't reach it; mostly empty.

        A coordinator that others can reach is a sign of workers elsewhere.
        """
        told = self.advertise or self.listen.address
        if self.coordinator.is_loopback or not told.is_loopback:
            return ""
        insecure = "" if self.listen.credentials.tls else " (and --insecure)"
        return (
            f"workers will connect to this shard at {told.host}, which is each "
            "worker's own machine, though the coordinator is at "
            f"{self.coordinator.host}: if some are on other machines, say with "
            f"--listen HOST:PORT{insecure} or --advertise HOST:PORT where they reach it"
        )
