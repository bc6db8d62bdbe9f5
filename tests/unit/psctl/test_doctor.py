"""What the doctor makes of what it has seen. The probes are in the integration test."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psctl.doctor import checks
from psctl.doctor.checks import CHECKS, NOT_REACHED, Stage, examine, stage_of
from psctl.doctor.findings import (
    Finding,
    Level,
    exit_code,
    finding_text,
    findings_json,
    ok,
    problem,
    summary_text,
    unknown,
    warning,
)
from psctl.doctor.probes import (
    Cores,
    Refused,
    Room,
    SeenJob,
    SeenShard,
    Surroundings,
    TorchSeen,
    cpu_quota,
    local_path,
)
from pswire.addresses import Address
from pswire.exit_codes import ExitCode
from pswire.limits import MESSAGE_BYTES_MAX, PROTOCOL_VERSION
from pswire.security.credentials import CredentialsError
from pswire.security.tls_problem import ShownCertificate
from psworker.launch.reachability import Cause, Problem
from psworker.transport.probe_client import Probed

HERE = "10.0.0.9"
ADDRESS = Address("trainer", 7070)
VERSIONS = {"paramserver": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"}
DAY_S = 24 * 3600.0

PROBED = Probed(
    protocol_version=PROTOCOL_VERSION,
    release="0.1.0",
    versions={"torch": "2.13.0+cu130", "python": "3.13.1"},
    unix_s=1000.0,
    message_bytes_max=MESSAGE_BYTES_MAX,
    caller_host=HERE,
    knows_callers=True,
    sharing_obstacle="",
    taken_s=0.001,
    halfway_unix_s=1000.0,
)
SHARD = SeenShard(
    0,
    "ready",
    f"{HERE}:5000",
    PROBED,
    sent_bytes_per_s=1e8,
    received_bytes_per_s=1e8,
)


def document(**changes: object) -> dict[str, Any]:
    found: dict[str, Any] = {
        "job": {"job_id": "job-1"},
        "phase": "running",
        "diagnosis": {"cause": "training", "sentence": "it trains", "who": []},
        "failure": None,
        "compression": None,
        "checkpoints": None,
        "workers": [],
        "shards": [
            {
                "shard_index": 0,
                "state": "ready",
                "address": f"{HERE}:5000",
                "parameter_bytes": 1 << 20,
            }
        ],
    }
    return {**found, **changes}


def job(
    probed: Probed | None = PROBED, *shards: SeenShard, **changes: object
) -> SeenJob:
    return SeenJob(
        document(**changes), probed, (0.001, 0.002, 0.003), shards or (SHARD,)
    )


def seen(found: Finding | Iterator[Finding]) -> list[tuple[Level, str]]:
    """Level and text, the cure behind it."""
    all_found = [found] if isinstance(found, Finding) else list(found)
    for each in all_found:
        # Whatever is wrong, the reader is told what to do.
        assert bool(each.cure) or each.level in (Level.OK, Level.UNKNOWN), each
        json.dumps(dict(each.figures))
    return [(each.level, f"{each.seen} -> {each.cure}") for each in all_found]


def one(found: Finding | Iterator[Finding]) -> tuple[Level, str]:
    ((level, text),) = seen(found)
    return level, text


@pytest.mark.parametrize(
    ("found", "proxies", "level", "words"),
    [
        (None, {}, Level.OK, "accepts connections"),
        (
            Problem(Cause.REFUSED, "connection refused - nothing is there; start it"),
            {},
            Level.PROBLEM,
            "refused: nothing is there (the host is up) -> start it",
        ),
        (Problem(Cause.NAME, "it does not resolve"), {}, Level.UNKNOWN, "does not"),
        (
            Problem(Cause.OTHER, "no answer at all - a firewall drops the packets"),
            {},
            Level.PROBLEM,
            "no answer at all -> a firewall",
        ),
        (
            Problem(Cause.OTHER, "no answer at all - a firewall drops the packets"),
            {"https_proxy": "http://p:3128"},
            Level.PROBLEM,
            "https_proxy), and paramserver goes through none",
        ),
    ],
)
def test_a_port_that_takes_no_connection_is_told_by_its_cause(
    found: Problem | None, proxies: dict[str, str], level: Level, words: str
) -> None:
    told, text = one(checks.check_port(found, proxies))
    assert told is level
    assert words in text


def test_a_name_that_does_not_resolve_is_a_problem_with_a_cure() -> None:
    name = Problem(Cause.NAME, "the name 'x' does not resolve (no); correct it")
    assert one(checks.check_name(ADDRESS, name)) == (
        Level.PROBLEM,
        "the name 'x' does not resolve (no) -> correct it",
    )
    silent = Problem(Cause.NAME, "the name 'x' does not resolve: the server is silent")
    assert "resolv.conf" in one(checks.check_name(ADDRESS, silent))[1]
    assert one(checks.check_name(ADDRESS, (HERE,)))[0] is Level.OK


@pytest.mark.parametrize(
    ("left_s", "level"),
    [(30 * DAY_S, Level.OK), (3 * DAY_S, Level.WARNING), (-1.0, Level.PROBLEM)],
)
def test_a_certificate_is_told_before_it_ends(left_s: float, level: Level) -> None:
    now_s = 1e9
    shown = ShownCertificate(("trainer", HERE), now_s + left_s)
    own: Any = object()  # only whether there are any counts
    told, text = one(checks.check_tls(shown, own, now_s))
    assert told is level
    assert "for trainer, 10.0.0.9, until" in text


def test_credentials_that_prove_nothing_are_a_problem() -> None:
    error = CredentialsError("can't read --tls-ca x: no such file; see the name")
    assert one(checks.check_credentials(error, {}, 0.0)) == (
        Level.PROBLEM,
        "can't read --tls-ca x: no such file -> see the name",
    )
    assert one(checks.check_credentials(None, {"PS_TOKEN": "x"}, 0.0))[0] is Level.OK


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (Refused("UNIMPLEMENTED", "x"), "no coordinator -> name the coordinator's"),
        (
            Refused("PROTOCOL_VERSION", "speaks 2"),
            "speaks 2 -> install the same",
        ),
        (Refused("UNAUTHENTICATED", "it asks for a token"), "-> give --token-file"),
        (Refused("DEADLINE_EXCEEDED", "late"), "gives no answer -> see whether it is"),
        (Refused("INTERNAL", "odd"), "internal: odd -> see the coordinator's log"),
    ],
)
def test_what_listens_and_tells_nothing_is_a_problem(
    refused: Refused, words: str
) -> None:
    level, text = one(checks.check_answer(refused))
    assert level is Level.PROBLEM
    assert words in text


def test_the_state_of_a_job_is_judged() -> None:
    assert one(checks.check_job(job())) == (Level.OK, "it trains -> ")
    slow = job(
        diagnosis={"cause": "straggler", "sentence": "w1 is slow", "who": ["w1"]}
    )
    assert one(checks.check_job(slow))[0] is Level.WARNING
    assert one(checks.check_job(slow))[1].startswith("w1 is slow")
    assert one(checks.check_job(job(failure="lost")))[0] is Level.PROBLEM
    lost = document()["shards"][0] | {"state": "missing"}
    level, text = one(checks.check_job(job(shards=[lost])))
    assert (level, text.split(" -> ")[0]) == (Level.PROBLEM, "shard 0 is not there")


def test_a_shard_that_is_not_reached_is_named_with_its_address() -> None:
    away = replace(SHARD, index=1, probed=None, failure="connection refused")
    assert one(checks.check_shards(job(), ADDRESS))[0] is Level.OK
    level, text = one(checks.check_shards(job(PROBED, SHARD, away), ADDRESS))
    assert level is Level.PROBLEM
    assert "shard 1 at 10.0.0.9:5000 is not reached: connection refused" in text
    # From another machine its own loopback address leads nowhere.
    local = replace(away, address="127.0.0.1:5000")
    assert (
        "--advertise" in one(checks.check_shards(job(PROBED, SHARD, local), ADDRESS))[1]
    )
    same = Address("127.0.0.1", 7070)
    assert "--advertise" not in one(checks.check_shards(job(PROBED, local), same))[1]
    missing = SeenShard(0, "missing", None)
    assert one(checks.check_shards(job(PROBED, missing), ADDRESS))[0] is Level.UNKNOWN


def test_other_versions_are_told() -> None:
    assert one(checks.check_versions(job(), VERSIONS))[0] is Level.OK
    other = replace(PROBED, release="0.2.0", versions={"torch": "2.12.1"})
    level, text = one(checks.check_versions(job(other), VERSIONS))
    assert level is Level.WARNING
    assert "paramserver 0.1.0 here and 0.2.0 at the coordinator" in text
    assert "torch 2.13.0+cpu here and 2.12.1 at the coordinator" in text
    speaks = replace(PROBED, protocol_version=PROTOCOL_VERSION + 1)
    of_shard = replace(SHARD, probed=speaks)
    assert (
        one(checks.check_versions(job(PROBED, of_shard), VERSIONS))[0] is Level.PROBLEM
    )
    silent = replace(SHARD, probed=None)
    assert one(checks.check_versions(job(None, silent), VERSIONS))[0] is Level.UNKNOWN


@pytest.mark.parametrize(
    ("off_s", "taken_s", "level"),
    [
        (0.4, 0.001, Level.OK),
        (-3.0, 0.001, Level.WARNING),
        (90.0, 0.001, Level.PROBLEM),
        # A slow call does not tell the time so exactly.
        (3.0, 5.0, Level.OK),
    ],
)
def test_a_clock_that_is_wrong_is_told(
    off_s: float, taken_s: float, level: Level
) -> None:
    other = replace(PROBED, unix_s=1000.0 + off_s, taken_s=taken_s)
    assert one(checks.check_clock(job(other)))[0] is level
    shard = replace(SHARD, probed=other)
    assert one(checks.check_clock(job(PROBED, shard)))[0] is level


def test_a_long_way_is_told_by_the_median() -> None:
    near = replace(job(), round_trips_s=(0.001, 0.001, 0.9))
    assert one(checks.check_round_trip(near))[0] is Level.OK
    far = replace(job(), round_trips_s=(0.08, 0.081, 0.001))
    assert "80.0 ms" in one(checks.check_round_trip(far))[1]
    assert one(checks.check_round_trip(far))[0] is Level.WARNING


def test_a_link_that_is_slow_for_the_model_is_told() -> None:
    assert one(checks.check_throughput(job()))[0] is Level.OK
    slow = replace(SHARD, received_bytes_per_s=1e5)
    level, text = one(checks.check_throughput(job(PROBED, slow)))
    assert level is Level.WARNING
    assert "its part of the model takes 10.5 s each way" in text
    late = replace(SHARD, sent_bytes_per_s=None, rate_failure="deadline")
    assert one(checks.check_throughput(job(PROBED, late)))[0] is Level.UNKNOWN


def test_smaller_messages_are_a_problem() -> None:
    assert one(checks.check_messages(job()))[0] is Level.OK
    small = replace(SHARD, probed=replace(PROBED, message_bytes_max=4 << 20))
    assert one(checks.check_messages(job(PROBED, small)))[0] is Level.PROBLEM


@pytest.mark.parametrize(
    ("obstacle", "environment", "level"),
    [
        ("", {}, Level.OK),
        ("it runs on another machine", {}, Level.OK),
        ("it runs as user 0, the caller as 5", {}, Level.WARNING),
        ("", {"PS_SHARED_MEMORY": "0"}, Level.WARNING),
    ],
)
def test_shared_memory_is_told_with_what_stands_against_it(
    obstacle: str, environment: dict[str, str], level: Level
) -> None:
    shard = replace(SHARD, probed=replace(PROBED, sharing_obstacle=obstacle))
    told, text = one(checks.check_shared_memory(job(PROBED, shard), environment))
    assert told is level
    assert obstacle in text


@pytest.mark.parametrize(
    ("knows_callers", "host", "has_tls", "words"),
    [
        (True, "trainer", True, "no port of the job is open"),
        (False, "127.0.0.1", False, "no port of the job is open"),
        (False, "trainer", False, "anyone who reaches the port can read and change"),
        (True, "trainer", False, "go without encryption"),
    ],
)
def test_open_ports_are_told(
    knows_callers: bool, host: str, has_tls: bool, words: str
) -> None:
    probed = replace(PROBED, knows_callers=knows_callers)
    shard = replace(SHARD, address=f"{host}:5000", probed=probed)
    own: Any = object() if has_tls else None
    found = checks.check_listeners(job(probed, shard), Address(host, 1), own)
    assert words in one(found)[1]


@pytest.mark.parametrize(
    ("torch", "has_gpu", "level"),
    [
        (TorchSeen(failure="no module named torch"), False, Level.PROBLEM),
        (TorchSeen(version="2.13.0", devices=("H200",)), True, Level.OK),
        (TorchSeen(version="2.13.0+cpu"), False, Level.OK),
        (TorchSeen(version="2.13.0+cpu"), True, Level.WARNING),
        (
            TorchSeen(
                version="2.13.0",
                built_for="13.0",
                why_no_device="no NVIDIA driver",
            ),
            False,
            Level.OK,
        ),
        (
            TorchSeen(
                version="2.13.0", built_for="13.0", why_no_device="NVIDIA driver"
            ),
            True,
            Level.WARNING,
        ),
    ],
)
def test_torch_and_its_devices_are_judged(
    torch: TorchSeen, has_gpu: bool, level: Level
) -> None:
    assert one(checks.check_torch(torch, has_gpu))[0] is level


@pytest.mark.parametrize(
    ("cores", "threads", "workers", "words"),
    [
        (Cores(8, None, 0.0, ""), 8, 1, ""),
        (Cores(8, None, 0.0, "2"), 8, 4, ""),
        (Cores(8, None, 0.0, ""), 8, 4, "4 x 8 threads of workers on 8 cores"),
        (Cores(8, 2.0, 0.0, ""), 8, 1, "1 x 8 threads of workers on 2 cores of 8 by"),
        (Cores(4, None, 0.0, "1"), 4, 6, "6 x 1 threads of workers on 4 cores"),
        (Cores(4, None, 9.0, "1"), 4, 1, "a load of 9.0 on 4 cores: other programs"),
    ],
)
def test_more_threads_than_cores_are_told(
    cores: Cores, threads: int, workers: int, words: str
) -> None:
    found = seen(
        checks.check_cores(cores, TorchSeen(thread_count=threads), workers, None)
    )
    warned = " ".join(text for level, text in found if level is Level.WARNING)
    assert bool(warned) == bool(words)
    assert words in warned


def test_workers_and_shards_of_this_machine_are_counted() -> None:
    here, there = {"address": f"{HERE}:1"}, {"address": "10.0.0.8:1"}
    shards = [
        *document()["shards"],
        {**document()["shards"][0], "address": "10.0.0.8:2"},
    ]
    found = job(workers=[here, here, there], shards=shards)
    assert checks.processes_here(found) == (2, 1)
    assert checks.processes_here(None) == (0, 0)
    cores = Cores(2, None, 0.0, "1")
    level, text = one(checks.check_cores(cores, TorchSeen(), None, found))
    assert (level, text.split(" -> ")[0]) == (
        Level.WARNING,
        "2 workers and 1 shard here on 2 cores",
    )


def test_few_descriptors_are_told() -> None:
    assert one(checks.check_descriptors((256, 4096)))[0] is Level.WARNING
    assert one(checks.check_descriptors((65_536, 65_536)))[0] is Level.OK
    assert "any number" in one(checks.check_descriptors((-1, -1)))[1]


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, Level.OK),
        ({"free_bytes": 500 << 20}, Level.WARNING),
        ({"free_bytes": 1 << 20}, Level.PROBLEM),
        ({"free_bytes": None}, Level.PROBLEM),
        ({"free_files": 3}, Level.PROBLEM),
        ({"is_writable": False}, Level.PROBLEM),
    ],
)
def test_a_full_disk_is_told(changes: dict[str, Any], level: Level) -> None:
    room = Room("/c", "checkpoints", 4 << 30, 8 << 30, 10_000, True)
    assert one(checks.check_disk((replace(room, **changes),), None))[0] is level


def test_checkpoints_need_room_for_two() -> None:
    room = Room("/c", "checkpoints", 4 << 30, 8 << 30, 10_000, True)
    large = job(checkpoints={"url": "/c", "newest": {"byte_count": 3 << 30}})
    assert one(checks.check_disk((room,), large))[0] is Level.WARNING
    temporary = replace(room, purpose="temporary files")
    assert one(checks.check_disk((temporary,), large))[0] is Level.OK


def test_a_small_dev_shm_is_told() -> None:
    room = Room("/dev/shm", "loaders", 64 << 20, 64 << 20, None, True)
    assert "--shm-size" in one(checks.check_dev_shm(room))[1]
    large = replace(room, free_bytes=8 << 30)
    assert one(checks.check_dev_shm(large))[0] is Level.OK
    assert one(checks.check_dev_shm(replace(room, free_bytes=None)))[0] is Level.WARNING


def test_the_limit_of_a_container_is_the_least_of_its_groups(tmp_path: Path) -> None:
    own = tmp_path / "sys/fs/cgroup/a/b"
    own.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    assert cpu_quota(tmp_path) is None
    (own / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
    (own.parent / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5


def test_urls_of_folders_are_read() -> None:
    assert local_path("runs/monday") == "runs/monday"
    assert local_path("file:///runs") == "/runs"
    assert local_path("s3://bucket/runs") is None


def test_a_problem_is_what_the_exit_code_tells() -> None:
    fine = [("a", ok("x")), ("b", warning("x", "y")), ("c", unknown("x"))]
    assert exit_code(fine) is ExitCode.DONE
    assert exit_code([*fine, ("d", problem("x", "y"))]) is ExitCode.ERROR


def test_the_last_line_counts_findings() -> None:
    slow = ("b", warning("x", "y"))
    assert summary_text([("a", ok("x")), slow]) == "1 ok, 1 warning"
    bad = ("c", problem("x", "y"))
    assert summary_text([slow, slow, bad, bad]) == "2 warnings, 2 problems"


def test_json_has_all_levels_and_every_field() -> None:
    findings = [("a", ok("x", n=1)), ("b", problem("x", "y"))]
    assert findings_json("h:1", findings) == {
        "schema_version": 1,
        "coordinator": "h:1",
        "counts": {"ok": 1, "warning": 0, "problem": 1, "unknown": 0},
        "findings": [
            {
                "check": "a",
                "level": "ok",
                "seen": "x",
                "cure": None,
                "figures": {"n": 1},
            },
            {"check": "b", "level": "problem", "seen": "x", "cure": "y", "figures": {}},
        ],
    }


def test_what_strangers_send_can_not_steer_a_terminal() -> None:
    assert "\x1b" not in finding_text("a", problem("x\x1b[2J", "y\n"))


def test_checks_of_a_job_are_told_as_not_made_where_it_is_not_reached() -> None:
    names = [check.name for check in CHECKS]
    assert len({*names}) == len(names)
    around = Surroundings(ADDRESS, environment={})
    around.port_problem = Problem(Cause.REFUSED, "connection refused - x; y")
    around.addresses = (HERE,)
    assert stage_of(around) is Stage.NAMED
    found = list(examine(around, skipped=("torch",)))
    left_out = {name for name, each in found if each is NOT_REACHED}
    assert left_out == {c.name for c in CHECKS if c.stage > Stage.NAMED}
    alone = Surroundings(None, environment={})
    made = {name for name, _ in examine(alone, skipped=("torch",))}
    assert made == {c.name for c in CHECKS if c.stage is Stage.MACHINE} - {"torch"}


def test_the_page_lists_every_check() -> None:
    page = Path(__file__).parents[3].joinpath("docs/psctl.md").read_text()
    for check in CHECKS:
        assert f"| `{check.name}` |" in page
