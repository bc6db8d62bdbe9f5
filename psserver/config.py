"""Settings of the daemons, built once from the command line."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from pswire.addresses import Address
from pswire.limits import SHARD_COUNT_MAX


class ConfigurationError(ValueError):
    """A setting is wrong; the text says which, why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Where a daemon listens.

    Attributes:
        address: Port 0 means any free port.
        insecure: Whether it may listen beyond loopback although nothing protects it.
    """

    address: Address
    insecure: bool = False

    def validate(self) -> None:
        """Refuses to open an unprotected port to the network by accident.

        Raises:
            ConfigurationError: See above.
        """
        if not self.address.is_loopback and not self.insecure:
            raise ConfigurationError(
                f"--listen {self.address} can be reached by other machines, and this "
                "release has neither TLS nor tokens: anyone who reaches the port "
                "could write to the model; listen on 127.0.0.1, or say --insecure "
                "on a network that you trust"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Settings of a coordinator.

    Attributes:
        listen: Where it listens.
        state_dir: Folder of its durable state.
        shard_count: Shards of the job.
        workers_min: Workers that must be there before the first clock.
        lease_ttl_ms: Bound on the detection of a lost process. Shorter finds it
            sooner, and takes slow machines for dead ones.
        job_seed: From which the seeds of all epochs follow.
    """

    listen: ListenConfig
    state_dir: Path
    shard_count: int
    workers_min: int = 1
    lease_ttl_ms: int = 10_000
    job_seed: int = 0

    def validate(self) -> None:
        """Checks every setting.

        Raises:
            ConfigurationError: The first one that is wrong.
        """
        self.listen.validate()
        if not 1 <= self.shard_count <= SHARD_COUNT_MAX:
            raise ConfigurationError(
                f"--shards {self.shard_count} is not in 1 to {SHARD_COUNT_MAX}"
            )
        if self.workers_min < 1:
            raise ConfigurationError(f"--min-workers {self.workers_min} is below 1")
        if self.lease_ttl_ms < 4_000:
            raise ConfigurationError(
                f"--lease-ttl {self.lease_ttl_ms / 1000:g} is below 4 s: a ping, its "
                "time-out and the time to reconnect take 3 s together"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """Settings of a shard.

    Attributes:
        listen: Where it listens.
        coordinator: Where the coordinator is.
        advertise: Where workers reach it; None for where it listens.
        state_dir: Folder of its durable state.
        thread_count: Threads that apply updates.
    """

    listen: ListenConfig
    coordinator: Address
    advertise: Address | None
    state_dir: Path
    thread_count: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))

    def validate(self) -> None:
        """Checks every setting.

        Raises:
            ConfigurationError: The first one that is wrong.
        """
        self.listen.validate()
        if self.listen.address.host in ("0.0.0.0", "::") and self.advertise is None:
            raise ConfigurationError(
                f"--listen {self.listen.address} is every address of this machine: "
                "say with --advertise HOST:PORT which one workers shall use"
            )
        if self.thread_count < 1:
            raise ConfigurationError(f"--threads {self.thread_count} is below 1")
