"""The checks: what each finding means and what to do next, in one table.

A check is a pure function of what a probe has seen, and an entry in `CHECKS`.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from importlib import metadata
from statistics import median
from typing import Final

from psctl.doctor.findings import Finding, ok, problem, unknown, warning
from psctl.doctor.probes import (
    Cores,
    Refused,
    Room,
    SeenJob,
    SeenShard,
    Surroundings,
    TorchSeen,
)
from psctl.tables import count_text
from pswire.addresses import Address, parse_address
from pswire.byte_text import byte_text
from pswire.limits import MESSAGE_BYTES_MAX, PROTOCOL_VERSION
from pswire.reasons import ErrorReason
from pswire.security.certificates import Certificates, date_text
from pswire.security.credentials import CredentialsError
from pswire.security.tls_problem import ShownCertificate
from pswire.shared_memory.segments import SHARED_MEMORY_VARIABLE, is_wanted
from psworker.launch.reachability import Cause, Problem
from psworker.status_row import QUIET_CAUSES
from psworker.transport.probe_client import Probed

TORCH: Final = "torch"

CLOCK_NOTICE_S: Final = 1.0
"""Beyond this, lines of several logs are not in order."""

CLOCK_PROBLEM_S: Final = 60.0
"""Beyond this, certificates and tokens that were just made may not count yet."""

CERTIFICATE_NOTICE_S: Final = 7 * 24 * 3600.0

ROUND_TRIP_NOTICE_S: Final = 0.05
"""Of steps that take less than a second, this is a good part."""

TRANSFER_NOTICE_S: Final = 1.0
"""For the values of the whole model, one way."""

DESCRIPTOR_COUNT_NOTICE: Final = 1024
"""Below this a process with loaders, or a daemon of a large job, may run out."""

SHARED_BYTES_NOTICE: Final = 256 << 20
"""Docker gives a container 64 MiB, which loaders with a few processes fill."""

ROOM_BYTES_NOTICE: Final = 1 << 30
FILES_NOTICE: Final = 1000

LOAD_NOTICE: Final = 1.5
"""Processes that want to run, for each core."""


def check_name(
    coordinator: Address | None, found: tuple[str, ...] | Problem
) -> Finding:
    assert coordinator is not None, "checks of a job are for one"
    if isinstance(found, Problem):
        seen, _, cure = found.text.partition("; ")
        return problem(
            seen, cure or "use an IP address, or see /etc/resolv.conf and the network"
        )
    return ok(f"{coordinator.host} is {', '.join(found[:4])}", addresses=list(found))


def check_port(found: Problem | None, proxies: Mapping[str, str]) -> Finding:
    if found is None:
        return ok("something accepts connections there")
    if found.cause is Cause.NAME:
        return unknown("not looked at: the name does not resolve")
    seen, _, cure = found.text.replace(" - ", "; ", 1).partition("; ")
    if "; " in cure:
        more, _, cure = cure.partition("; ")
        seen = f"{seen}: {more}"
    if found.cause is Cause.REFUSED:
        return problem(f"{seen} (the host is up)", cure)
    if proxies:
        cure = (
            "open a direct way to the port: this machine names a proxy "
            f"({', '.join(proxies)}), and paramserver goes through none"
        )
    elif not cure:
        cure = "see whether the host is up, and which firewall or NetworkPolicy is on "
        cure += "the way"
    return problem(seen, cure)


def check_proxy(proxies: Mapping[str, str]) -> Finding:
    if not proxies:
        return ok("no proxy is named")
    named = ", ".join(f"{name}={url}" for name, url in proxies.items())
    return ok(f"{named}: not used, connections are direct", variables=list(proxies))


def check_credentials(
    found: Certificates | CredentialsError | None,
    environment: Mapping[str, str],
    now_s: float,
) -> Finding:
    if isinstance(found, CredentialsError):
        seen, _, cure = str(found).rpartition("; ")
        return problem(seen or cure, cure if seen else "correct the file or variable")
    has_token = any(environment.get(name) for name in ("PS_TOKEN", "PS_TOKEN_FILE"))
    token = "a token" if has_token else "no token"
    if found is None:
        return ok(f"{token} and no certificate")
    ends_at_s = found.current().ends_at_s
    seen = f"{token}; certificates that hold until {date_text(ends_at_s)}"
    return _until(ends_at_s, now_s, seen, "replace them, as `psctl tls renew` does")


def check_tls(
    found: ShownCertificate | str | None,
    own: Certificates | CredentialsError | None,
    now_s: float,
) -> Finding:
    if isinstance(found, str):
        seen, _, cure = found.partition(": ")
        return problem(seen, cure or "see the log of the coordinator")
    if isinstance(own, CredentialsError):
        return unknown("not looked at: the credentials can't be used")
    if own is None:
        return ok("neither side speaks TLS")
    if found is None:
        return unknown("the server has shown no certificate", "run this once more")
    ends = date_text(found.ends_at_s)
    seen = f"the server's certificate is for {', '.join(found.names[:4])}, until {ends}"
    return _until(
        found.ends_at_s, now_s, seen, "replace it on its machine: `psctl tls renew`"
    )


def _until(ends_at_s: float, now_s: float, seen: str, cure: str) -> Finding:
    figures = {"ends_at_unix_s": ends_at_s}
    if ends_at_s <= now_s:
        return problem(seen, cure, **figures)
    if ends_at_s - now_s < CERTIFICATE_NOTICE_S:
        return warning(seen, cure, **figures)
    return ok(seen, **figures)


def check_answer(found: SeenJob | Refused | None) -> Finding:
    """Whether what listens there is the coordinator of a job, and talks to us."""
    if isinstance(found, SeenJob):
        job_id = found.document["job"]["job_id"]
        return ok(f"the coordinator of job {job_id} answers", job_id=job_id)
    assert found is not None, "else it is not trusted"
    seen, _, cure = found.text.partition("; ")
    if found.code == "UNIMPLEMENTED":
        return problem(
            "a gRPC server answers there that is no coordinator",
            "name the coordinator's address, not a shard's or another program's",
        )
    if found.code == ErrorReason.PROTOCOL_VERSION.name:
        return problem(
            found.text, "install the same release of paramserver on both machines"
        )
    if found.code in (
        ErrorReason.UNAUTHENTICATED.name,
        ErrorReason.PERMISSION_DENIED.name,
    ):
        return problem(
            seen, cure or "give --token-file, or a certificate, of a role that may read"
        )
    if found.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        return problem(
            "what accepts connections there gives no answer",
            "see whether it is stopped or overloaded, or another program's port; "
            f"gRPC says: {found.text}",
        )
    return problem(f"{found.code.lower()}: {found.text}", "see the coordinator's log")


def check_job(found: SeenJob) -> Finding:
    """What the coordinator itself makes of it."""
    document = found.document
    diagnosis = document["diagnosis"]
    cause = diagnosis["cause"]
    if cause == "failed" or document["failure"]:
        return problem(
            diagnosis["sentence"] or f"the job has failed: {document['failure']}",
            "see the logs of the process it names, and docs/checkpoints.md for how it "
            "goes on",
            cause=cause,
        )
    missing = [s["shard_index"] for s in document["shards"] if s["state"] != "ready"]
    if missing:
        return problem(
            f"shard {', '.join(map(str, missing[:8]))} is not there",
            "start it, or look into its log",
            cause=cause,
            shards=missing,
        )
    seen = diagnosis["sentence"] or document["phase"]
    if cause in QUIET_CAUSES:
        return ok(seen, cause=cause)
    return warning(
        seen, "see `psctl top`, and docs/troubleshooting.md for what to do", cause=cause
    )


def check_shards(found: SeenJob, coordinator: Address | None) -> Iterator[Finding]:
    """Whether a worker here reaches every shard."""
    reached = 0
    for shard in found.shards:
        if shard.probed is not None or shard.address is None:
            reached += shard.probed is not None
            continue
        yield _unreached(shard, coordinator)
    if not reached and not any(shard.address for shard in found.shards):
        yield unknown("no shard is there yet")
    elif reached == len(found.shards):
        yield ok(f"all {count_text(reached, 'shard')} reached", count=reached)


def _unreached(shard: SeenShard, coordinator: Address | None) -> Finding:
    address = str(shard.address)
    seen = f"shard {shard.index} at {address} is not reached: {shard.failure}"
    figures = {"shard_index": shard.index, "address": address}
    try:
        is_local = parse_address(address).is_loopback
    except ValueError:
        is_local = False
    if is_local and coordinator is not None and not coordinator.is_loopback:
        return problem(
            f"shard {shard.index} tells workers to call {address}, which is their own "
            "machine",
            "start it with --listen 0.0.0.0:PORT, or --advertise and the name of its "
            "machine",
            **figures,
        )
    return problem(
        seen,
        "open the way to this port too: workers call every shard, not the coordinator "
        "alone",
        **figures,
    )


def check_versions(found: SeenJob, installed: Mapping[str, str]) -> Finding:
    """Whether both sides are of one release."""
    daemons = _daemons(found)
    if not daemons:
        return unknown(
            "the daemons are of a release that does not say its version",
            "install the same release everywhere",
        )
    figures: dict[str, object] = {"here": dict(installed)}
    figures["there"] = {name: _versions(each) for name, each in daemons.items()}
    for name, each in daemons.items():
        if each.protocol_version != PROTOCOL_VERSION:
            return problem(
                f"{name} speaks protocol {each.protocol_version}, this machine "
                f"{PROTOCOL_VERSION}",
                "install the same release of paramserver on both machines",
                **figures,
            )
    differing = {
        f"{package} {installed[package]} here and {there[package]} at {name}"
        for name, each in daemons.items()
        for there in [_versions(each)]
        for package in ("paramserver", "torch")
        if package in there and _public(there[package]) != _public(installed[package])
    }
    if differing:
        return warning(
            ", ".join(sorted(differing)[:4]),
            "install the same versions: other versions of torch may compute other "
            "numbers",
            **figures,
        )
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    return ok(f"{shown}; the same release there", **figures)


def _daemons(found: SeenJob) -> dict[str, Probed]:
    """The daemons that say what they are, by name."""
    named = {"the coordinator": found.probed}
    named |= {f"shard {shard.index}": shard.probed for shard in found.shards}
    return {name: each for name, each in named.items() if each is not None}


def _versions(probed: Probed) -> dict[str, str]:
    return {"paramserver": probed.release, **probed.versions}


def _public(version: str) -> str:
    """Without what says how it was built, such as `+cpu`."""
    return version.partition("+")[0]


def check_clock(found: SeenJob) -> Iterator[Finding]:
    """Whether the wall clocks agree. Training goes by none of them."""
    worst: tuple[float, str] = (0.0, "")
    daemons = _daemons(found)
    for name, each in daemons.items():
        # What the way takes makes the difference uncertain.
        off_s = abs(each.unix_s - each.halfway_unix_s) - each.taken_s / 2
        worst = max(worst, (max(0.0, off_s), name))
    off_s, name = worst
    figures = {"difference_s": round(off_s, 3)}
    cure = "set the clocks of both machines, by NTP such as chrony"
    seen = f"the clock of {name} and this machine's are {off_s:.1f} s apart"
    if not daemons:
        yield unknown("the daemons are of a release that does not say its time")
    elif off_s >= CLOCK_PROBLEM_S:
        yield problem(f"{seen}: certificates and tokens may not count", cure, **figures)
    elif off_s >= CLOCK_NOTICE_S:
        yield warning(f"{seen}: logs are not in one order", cure, **figures)
    else:
        yield ok(f"clocks are less than {max(off_s, 0.1):.1f} s apart", **figures)


def check_round_trip(found: SeenJob) -> Finding:
    times = sorted(found.round_trips_s)
    if not times:
        return unknown("the coordinator is of a release that is not timed")
    middle, longest = median(times), times[-1]
    seen = (
        f"{1000 * middle:.1f} ms, median of {len(times)}; the longest "
        f"{1000 * longest:.1f} ms"
    )
    figures = {"median_ms": 1000 * middle, "max_ms": 1000 * longest}
    if middle >= ROUND_TRIP_NOTICE_S:
        return warning(
            seen,
            "a step takes one such trip at least: bring workers and shards nearer, or "
            "use prepare(overlap=True), larger batches, ssp or asp",
            **figures,
        )
    return ok(seen, **figures)


def check_throughput(found: SeenJob) -> Iterator[Finding]:
    """How long the model takes on its way, as it is sent without compression."""
    shard_bytes = {
        each["shard_index"]: each["parameter_bytes"]
        for each in found.document["shards"]
    }
    if not any(shard.probed for shard in found.shards):
        yield unknown("no shard is there to measure the way to")
    for shard in found.shards:
        if shard.rate_failure:
            yield unknown(
                f"shard {shard.index}: not measured: {shard.rate_failure}",
                "run this once more; if it stays, the link takes less than 64 KiB/s",
            )
        sent, received = shard.sent_bytes_per_s, shard.received_bytes_per_s
        if sent is None or received is None:
            continue
        figures = {
            "shard_index": shard.index,
            "sent_bytes_per_s": round(sent),
            "received_bytes_per_s": round(received),
        }
        seen = (
            f"shard {shard.index}: {byte_text(sent)}/s to it, {byte_text(received)}/s "
            "from it"
        )
        takes_s = shard_bytes.get(shard.index, 0) / min(sent, received)
        if takes_s < TRANSFER_NOTICE_S:
            yield ok(seen, **figures)
            continue
        yield warning(
            f"{seen}: its part of the model takes {takes_s:.1f} s each way",
            "compress (docs/compression.md), use prepare(overlap=True), more shards on "
            "more machines, or a faster link",
            **figures,
        )


def check_messages(found: SeenJob) -> Finding:
    least = min(
        (each.message_bytes_max for each in _daemons(found).values()),
        default=MESSAGE_BYTES_MAX,
    )
    figures = {"here_bytes": MESSAGE_BYTES_MAX, "there_bytes": least}
    if least < MESSAGE_BYTES_MAX:
        return problem(
            f"the daemons take messages of {byte_text(least)}, and this machine sends "
            f"up to {byte_text(MESSAGE_BYTES_MAX)}",
            "install the same release everywhere",
            **figures,
        )
    return ok(f"{byte_text(MESSAGE_BYTES_MAX)} on both sides", **figures)


def check_shared_memory(found: SeenJob, environment: Mapping[str, str]) -> Finding:
    """Whether tensors go through memory to the shards of this machine, or why not."""
    obstacles = {
        shard.index: shard.probed.sharing_obstacle
        for shard in found.shards
        if shard.probed is not None
    }
    if not is_wanted(environment.get(SHARED_MEMORY_VARIABLE, "1")):
        return warning(
            f"switched off here by {SHARED_MEMORY_VARIABLE}",
            "unset it, unless that is on purpose",
        )
    if not obstacles:
        return unknown("no shard has said whether it can share memory")
    if found.document["compression"]:
        return ok("not used: the job compresses what it sends")
    free = [index for index, why in obstacles.items() if not why]
    if len(free) == len(obstacles):
        return ok("tensors go through shared memory to all shards", shards=free)
    why = next(why for why in obstacles.values() if why)
    others = [index for index in obstacles if index not in free]
    seen = f"not with shard {', '.join(map(str, others[:8]))}: {why}"
    if "another machine" in why:
        return ok(seen, shards=free)
    return warning(
        seen,
        "run workers and shards of one machine as one user, in one network namespace "
        "(docs/shared-memory.md)",
        shards=free,
    )


def check_listeners(
    found: SeenJob, coordinator: Address | None, own: Certificates | None
) -> Iterator[Finding]:
    """Whether others on the network could read or write the model."""
    assert coordinator is not None, "checks of a job are for one"
    open_to: dict[str, list[str]] = {}
    addresses = {"the coordinator": str(coordinator)}
    addresses |= {f"shard {s.index}": s.address or "" for s in found.shards}
    for name, each in _daemons(found).items():
        if not parse_address(addresses[name]).is_loopback:
            kind = "who" if not each.knows_callers else "clear" if own is None else ""
            open_to.setdefault(kind, []).append(name)
    if names := open_to.get("who"):
        yield warning(
            f"{', '.join(names[:4])}: anyone who reaches the port can read and change "
            "the model (--insecure)",
            "give certificates (`psctl tls init`) or tokens (`psctl token create`), "
            "unless the network is yours alone: docs/security.md",
            daemons=names,
        )
    if names := open_to.get("clear"):
        yield warning(
            f"{', '.join(names[:4])}: tokens and tensors go without encryption "
            "(--insecure)",
            "give certificates too (`psctl tls init`): docs/security.md",
            daemons=names,
        )
    if not (open_to.keys() & {"who", "clear"}):
        yield ok("no port of the job is open to strangers")


def check_torch(found: TorchSeen, has_gpu_files: bool) -> Finding:
    if found.failure:
        return problem(
            f"torch can't be imported: {found.failure}", "install torch in this Python"
        )
    figures = {"version": found.version, "devices": list(found.devices)}
    if found.devices:
        names = ", ".join(dict.fromkeys(found.devices))
        devices = count_text(len(found.devices), "device")
        return ok(f"torch {found.version}: {devices}, {names}", **figures)
    if not found.built_for:
        if has_gpu_files:
            return warning(
                f"torch {found.version} is built without CUDA, and this machine has "
                "a GPU",
                "install a build of torch for CUDA",
                **figures,
            )
        return ok(f"torch {found.version} for CPUs, no GPU here", **figures)
    if has_gpu_files or "driver" not in found.why_no_device.lower():
        why = found.why_no_device or "no device is visible"
        return warning(
            f"torch {found.version} finds no GPU: {why}",
            "see `nvidia-smi`, CUDA_VISIBLE_DEVICES, and in a container --gpus all",
            **figures,
        )
    return ok(f"torch {found.version}: no GPU here, training on CPUs", **figures)


def check_cores(
    cores: Cores,
    torch: TorchSeen,
    workers: int | None,
    job: SeenJob | Refused | None,
) -> Iterator[Finding]:
    """Whether what computes here has cores to compute on."""
    usable = cores.count if cores.quota is None else min(cores.count, cores.quota)
    own_workers, shards = processes_here(job)
    workers = own_workers if workers is None else workers
    threads = thread_count(cores, torch)
    figures = {
        "core_count": cores.count,
        "quota_cores": cores.quota,
        "thread_count": threads,
        "worker_count": workers,
        "shard_count": shards,
        "load": round(cores.load, 2),
    }
    have = f"{usable:g} core" + ("s" if usable != 1 else "")
    if cores.quota is not None and cores.quota < cores.count:
        have += f" of {cores.count} by the container's limit"
    each = max(1, int(usable) // max(1, workers))
    cure = (
        f"set OMP_NUM_THREADS={each} for the workers, or start them by one "
        "`psworker run --nproc`, which shares the cores"
    )
    computing = max(1, workers) * threads
    if threads and computing > usable and (workers > 1 or computing > usable + 0.5):
        yield warning(
            f"{max(1, workers)} x {threads} threads of workers on {have}",
            cure,
            **figures,
        )
    elif workers + shards > usable:
        yield warning(
            f"{count_text(workers, 'worker')} and {count_text(shards, 'shard')} here "
            f"on {have}",
            "start fewer processes here, or put shards on another machine",
            **figures,
        )
    else:
        processes = f"{count_text(workers, 'worker')} and {count_text(shards, 'shard')}"
        yield ok(
            f"{have}, {threads or 'torch decides how many'} threads in a process, "
            f"{processes} here",
            **figures,
        )
    if cores.load > LOAD_NOTICE * usable + workers + shards:
        yield warning(
            f"a load of {cores.load:.1f} on {have}: other programs compute here too",
            "see `top`, and stop or move what is not of the job",
            load=round(cores.load, 2),
        )


def thread_count(cores: Cores, torch: TorchSeen) -> int:
    """Threads of one worker; 0 where that is not known."""
    if cores.thread_setting.isdigit() and int(cores.thread_setting):
        return int(cores.thread_setting)
    return torch.thread_count


def processes_here(job: SeenJob | Refused | None) -> tuple[int, int]:
    """Workers and shards of the job on this machine, as the coordinator sees it."""
    if not isinstance(job, SeenJob) or job.probed is None:
        return 0, 0
    here = job.probed.caller_host

    def is_here(address: str | None) -> bool:
        return address is not None and address.rpartition(":")[0].strip("[]") == here

    return (
        sum(is_here(each["address"]) for each in job.document["workers"]),
        sum(is_here(each["address"]) for each in job.document["shards"]),
    )


def check_descriptors(limits: tuple[int, int]) -> Finding:
    soft, hard = limits
    figures = {"soft_limit": soft, "hard_limit": hard}
    if 0 <= soft < DESCRIPTOR_COUNT_NOTICE:
        return warning(
            f"a process may have {soft} file descriptors",
            "raise that: `ulimit -n 65536`, or LimitNOFILE= of the systemd unit",
            **figures,
        )
    shown = "any number of" if soft < 0 else str(soft)
    return ok(f"a process may have {shown} file descriptors", **figures)


def check_disk(
    rooms: tuple[Room, ...], job: SeenJob | Refused | None
) -> Iterator[Finding]:
    """Whether what is written has room: of checkpoints two, which there are a while."""
    newest_bytes = 0
    if isinstance(job, SeenJob):
        checkpoints = job.document["checkpoints"] or {}
        newest_bytes = (checkpoints.get("newest") or {}).get("byte_count", 0)
    for room in rooms:
        needed = ROOM_BYTES_NOTICE
        if room.purpose == "checkpoints":
            needed = max(needed, 2 * newest_bytes)
        yield _room_finding(room, needed)


def _room_finding(room: Room, needed: int) -> Finding:
    what = f"{room.folder} ({room.purpose})"
    if room.free_bytes is None:
        return problem(f"{what} can't be read", "name a folder of this machine")
    figures = {"folder": room.folder, "free_bytes": room.free_bytes}
    if not room.is_writable:
        return problem(
            f"{what} can't be written by this user",
            "change its owner, or run as the user that the daemons run as",
            **figures,
        )
    free = byte_text(room.free_bytes)
    if room.free_files is not None and room.free_files < FILES_NOTICE:
        return problem(
            f"{what}: room for {room.free_files} more files",
            "delete files: the file system has no inodes left",
            **figures,
        )
    if room.free_bytes < needed:
        level = problem if room.free_bytes < needed // 8 else warning
        return level(
            f"{what}: {free} free, {byte_text(needed)} are wanted",
            "make room, or name another folder; `psctl checkpoint prune` deletes old "
            "checkpoints",
            **figures,
        )
    return ok(f"{what}: {free} free", **figures)


def check_dev_shm(room: Room) -> Finding:
    if room.free_bytes is None:
        return warning(
            "there is no /dev/shm",
            "a DataLoader with num_workers needs it: mount a tmpfs there",
        )
    figures = {"free_bytes": room.free_bytes, "total_bytes": room.total_bytes}
    seen = f"{byte_text(room.free_bytes)} of {byte_text(room.total_bytes)} free"
    if not room.is_writable or room.free_bytes < SHARED_BYTES_NOTICE:
        return warning(
            f"{seen}: a DataLoader with num_workers may end by a bus error",
            "start the container with --shm-size=1g (Kubernetes: an emptyDir of medium "
            "Memory at /dev/shm)",
            **figures,
        )
    return ok(f"{seen}; shared memory of paramserver needs none of it", **figures)


def installed_versions() -> dict[str, str]:
    """Versions here, without importing anything of them."""
    import platform

    packages = ("paramserver", "torch", "grpcio", "protobuf")
    found = {name: metadata.version(name) for name in packages}
    return {**found, "python": platform.python_version()}


class Stage(IntEnum):
    """How far the way to a job goes, and how far it has to go for a check."""

    MACHINE = 0
    """Nothing of a job."""
    NAMED = 1
    """A coordinator is named."""
    CONNECTED = 2
    """Something accepts connections there."""
    TRUSTED = 3
    """Both sides take each other's credentials, as far as TLS is concerned."""
    ANSWERED = 4
    """It is a coordinator, and tells of its job."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of the table.

    Attributes:
        name: By which it is told, and skipped.
        stage: What it needs.
        run: Looks by the probes, and judges.
    """

    name: str
    stage: Stage
    run: Callable[[Surroundings], Finding | Iterator[Finding]]


def _job(around: Surroundings) -> SeenJob:
    assert isinstance(around.job, SeenJob), "else the check is not made"
    return around.job


def _own(around: Surroundings) -> Certificates | None:
    found = around.certificates
    return None if isinstance(found, CredentialsError) else found


CHECKS: Final = (
    Check("name", Stage.NAMED, lambda a: check_name(a.coordinator, a.addresses)),
    Check("port", Stage.NAMED, lambda a: check_port(a.port_problem, a.proxies)),
    Check("proxy", Stage.MACHINE, lambda a: check_proxy(a.proxies)),
    Check(
        "credentials",
        Stage.MACHINE,
        lambda a: check_credentials(a.certificates, a.environment, time.time()),
    ),
    Check(
        "tls",
        Stage.CONNECTED,
        lambda a: check_tls(a.handshake, a.certificates, time.time()),
    ),
    Check("coordinator", Stage.TRUSTED, lambda a: check_answer(a.job)),
    Check("job", Stage.ANSWERED, lambda a: check_job(_job(a))),
    Check("shards", Stage.ANSWERED, lambda a: check_shards(_job(a), a.coordinator)),
    Check(
        "versions",
        Stage.ANSWERED,
        lambda a: check_versions(_job(a), installed_versions()),
    ),
    Check("clock", Stage.ANSWERED, lambda a: check_clock(_job(a))),
    Check("round-trip", Stage.ANSWERED, lambda a: check_round_trip(_job(a))),
    Check("throughput", Stage.ANSWERED, lambda a: check_throughput(_job(a))),
    Check("messages", Stage.ANSWERED, lambda a: check_messages(_job(a))),
    Check(
        "shared-memory",
        Stage.ANSWERED,
        lambda a: check_shared_memory(_job(a), a.environment),
    ),
    Check(
        "listeners",
        Stage.ANSWERED,
        lambda a: check_listeners(_job(a), a.coordinator, _own(a)),
    ),
    Check("descriptors", Stage.MACHINE, lambda a: check_descriptors(a.descriptors)),
    Check("disk", Stage.MACHINE, lambda a: check_disk(a.rooms, a.job)),
    Check("dev-shm", Stage.MACHINE, lambda a: check_dev_shm(a.shared_folder)),
    Check(TORCH, Stage.MACHINE, lambda a: check_torch(a.torch, a.has_gpu_files)),
    Check(
        "cores",
        Stage.MACHINE,
        lambda a: check_cores(a.cores, a.torch, a.worker_count, a.job),
    ),
)

NOT_REACHED: Final = unknown("not looked at, since the job was not reached")


def stage_of(around: Surroundings) -> Stage:
    """How far the way goes from here to the job."""
    if around.coordinator is None:
        return Stage.MACHINE
    if around.port_problem is not None:
        return Stage.NAMED
    if isinstance(around.certificates, CredentialsError | str) or isinstance(
        around.handshake, str
    ):
        return Stage.CONNECTED
    return Stage.ANSWERED if isinstance(around.job, SeenJob) else Stage.TRUSTED


def examine(
    around: Surroundings, skipped: Collection[str] = ()
) -> Iterator[tuple[str, Finding]]:
    """Makes the checks, in order; each finding as soon as there is one."""
    if TORCH not in skipped:
        around.start_torch()
    stage = stage_of(around)
    for check in CHECKS:
        if check.name in skipped:
            continue
        if check.stage > stage:
            if stage is not Stage.MACHINE:
                yield check.name, NOT_REACHED
            continue
        found = check.run(around)
        for each in (found,) if isinstance(found, Finding) else found:
            yield check.name, each
