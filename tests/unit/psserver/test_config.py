"""What settings mean together, and what is said of those that contradict."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from psserver.config import (
    CoordinatorConfig,
    ListenConfig,
    OptionError,
    ShardConfig,
)
from psserver.edge.coordinator_settings import CoordinatorSettings, ShardLossPolicy
from pswire.addresses import Address, parse_address
from pswire.aggregation import Aggregation
from pswire.limits import CHUNK_BYTES_MAX
from pswire.membership import LossPolicy, Mode, ModeTerms, StepAtomicity
from pswire.security.credentials import Credentials, TlsFiles

CHUNK_KIB_MAX: Final = CHUNK_BYTES_MAX >> 10

PLAIN: Final = CoordinatorConfig(
    listen=ListenConfig(address=Address("127.0.0.1", 0)),
    state_dir=Path("state"),
    shard_count=2,
)


def settings_of(**changes: Any) -> CoordinatorSettings:  # noqa: ANN401, fields of a config
    config = replace(PLAIN, **changes)
    config.validate()
    return config.job_settings(job_id="job", job_seed=1)


def notes_of(**changes: Any) -> str:  # noqa: ANN401, fields of a config
    return "\n".join(replace(PLAIN, **changes).notes())


LOOPBACK = Address("127.0.0.1", 0)
EVERYWHERE = Address("0.0.0.0", 0)
KRUM = Aggregation.parse("krum:f=1")
OF_A_CLIENT = Credentials(tls=TlsFiles(ca=Path("ca.pem")))
CERTIFIED = Credentials(tls=TlsFiles(certificate=Path("c.pem"), key=Path("k.pem")))
MUTUAL = Credentials(
    tls=TlsFiles(ca=Path("ca.pem"), certificate=Path("c.pem"), key=Path("k.pem"))
)


@pytest.mark.parametrize(
    ("credentials", "tokens", "demands_certificates"),
    [
        (MUTUAL, None, True),
        (MUTUAL, Path("tokens.json"), False),
        (CERTIFIED, Path("tokens.json"), False),
    ],
)
def test_what_is_protected_may_listen_everywhere(
    credentials: Credentials, tokens: Path | None, demands_certificates: bool
) -> None:
    listen = ListenConfig(address=EVERYWHERE, credentials=credentials, tokens=tokens)
    listen.validate()
    assert listen.missing_protection == ""
    assert listen.demands_certificates is demands_certificates


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shard_count": 0}, ["--shards 0 is not a whole number from 1 to 1024"]),
        ({"workers_min": 0}, ["--min-workers 0"]),
        ({"lease_ttl_ms": 900}, ["--lease-ttl 0.9", "busy machine", "10 forgives"]),
        ({"staleness_bound": 3}, ["--staleness 3", "--mode bsp", "say --mode ssp"]),
        (
            {"mode": Mode.ASP, "staleness_bound": 3},
            ["--staleness 3", "--mode asp", "only ssp bounds"],
        ),
        ({"mode": Mode.SSP, "staleness_bound": -1}, ["--staleness -1", "asp"]),
        ({"quorum": 3}, ["--quorum 3", "--mode bsp", "say --mode quorum"]),
        ({"grace_window_s": 0.5}, ["--grace-window 0.5", "say --mode quorum"]),
        ({"mode": Mode.QUORUM, "quorum": 0}, ["--quorum 0"]),
        ({"mode": Mode.QUORUM, "grace_window_s": 4e3}, ["--grace-window 4000"]),
        ({"backup_worker_count": -1}, ["--backup-workers -1", "from 0 to"]),
        ({"backup_worker_count": 1 << 70}, ["--backup-workers 11805", "from 0 to"]),
        ({"workers_min": 1 << 70}, ["--min-workers 11805", "from 1 to"]),
        (
            {"aggregation": KRUM, "workers_min": 4},
            ["krum:f=1 tolerates 1", "2f + 3 = 5", "--min-workers is 4: raise it"],
        ),
        (
            {"aggregation": KRUM, "workers_min": 5, "backup_worker_count": 1},
            ["2f + 3 = 5", "--min-workers 5 leaves 4 with --backup-workers 1"],
        ),
        (
            {"aggregation": KRUM, "workers_min": 5, "mode": Mode.QUORUM, "quorum": 4},
            ["2f + 3 = 5", "--quorum is 4: raise it"],
        ),
        (
            {"mode": Mode.SSP, "backup_worker_count": 1},
            ["--backup-workers 1", "--mode ssp", "say --mode bsp"],
        ),
        (
            {"mode": Mode.QUORUM, "quorum": 2, "backup_worker_count": 1},
            ["--backup-workers 1", "--mode quorum", "say --quorum", "--mode bsp"],
        ),
        (
            {"mode": Mode.ASP, "backup_worker_count": 1},
            ["--backup-workers 1", "--mode asp"],
        ),
        (
            {
                "step_atomicity": StepAtomicity.CHUNK,
                "worker_loss_policy": LossPolicy.WAIT,
                "backup_worker_count": 1,
            },
            ["--step-atomicity chunk", "wait and --backup-workers 1", "taken back"],
        ),
        ({"delay_compensation": float("nan")}, ["--delay-compensation nan", "0.04"]),
        ({"delay_compensation": -1.0}, ["--delay-compensation -1"]),
        (
            {"chunk_kib": 63},
            [
                f"--chunk-kib 63 is not a whole number from 64 to {CHUNK_KIB_MAX}:",
                "leave it out",
            ],
        ),
        ({"chunk_kib": CHUNK_KIB_MAX + 1}, ["from 64 to", "at the same time"]),
        ({"chunk_kib": 0}, ["--chunk-kib 0 is not a whole number from 64 to"]),
        (
            {"shard_loss_policy": ShardLossPolicy.WAIT},
            ["--on-shard-loss wait", "without --checkpoint-dir", "are gone"],
        ),
        ({"checkpoint_url": ""}, ["--checkpoint-dir '' names no folder", "leave it"]),
        ({"checkpoint_url": "file:// "}, ["--checkpoint-dir 'file:// ' names no"]),
        (
            {"checkpoint_url": "memory://run"},
            ["--checkpoint-dir memory://run is the memory of one process", "share"],
        ),
        (
            {"listen": ListenConfig(address=Address("0.0.0.0", 0))},
            [
                "--listen 0.0.0.0:0",
                "without encryption or authentication",
                "--insecure",
            ],
        ),
        (
            {
                "listen": ListenConfig(
                    address=Address("0.0.0.0", 0), tokens=Path("tokens.json")
                )
            },
            ["without encryption: whoever sees its packets has the tokens"],
        ),
        (
            {"listen": ListenConfig(address=EVERYWHERE, credentials=CERTIFIED)},
            ["--listen 0.0.0.0:0", "without authentication: anyone who reaches"],
        ),
        (
            {"listen": ListenConfig(address=LOOPBACK, credentials=OF_A_CLIENT)},
            ["--tls-ca is there without --tls-cert and --tls-key", "psctl tls init"],
        ),
    ],
)
def test_what_contradicts_is_refused_with_the_cure(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(OptionError) as caught:
        settings_of(**changes)
    for word in words:
        assert word in str(caught.value)


def test_ssp_without_a_bound_has_three_and_says_so() -> None:
    assert settings_of(mode=Mode.SSP).staleness_bound == 3
    assert "3 clocks apart" in notes_of(mode=Mode.SSP)
    assert settings_of(mode=Mode.SSP, staleness_bound=0).staleness_bound == 0
    assert settings_of(mode=Mode.QUORUM).terms == ModeTerms(Mode.QUORUM, quorum=1)
    assert "no --quorum" in notes_of(mode=Mode.QUORUM)
    wanted = ModeTerms(Mode.QUORUM, quorum=4, grace_window_ms=500)
    quorum = settings_of(mode=Mode.QUORUM, quorum=4, grace_window_s=0.5)
    assert quorum.terms == wanted
    assert notes_of(mode=Mode.SSP, staleness_bound=0) == ""


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"worker_loss_policy": LossPolicy.WAIT}, "--on-worker-loss wait"),
        ({"backup_worker_count": 2}, "--backup-workers 2"),
    ],
)
def test_what_needs_two_phases_switches_them_on_and_says_so(
    changes: dict[str, Any], option: str
) -> None:
    assert settings_of(**changes).step_atomicity is StepAtomicity.CLOCK
    assert f"{option} switched --step-atomicity clock on" in notes_of(**changes)
    said = {**changes, "step_atomicity": StepAtomicity.CLOCK}
    assert settings_of(**said).step_atomicity is StepAtomicity.CLOCK
    assert notes_of(**said) == ""


def test_chunks_have_the_size_that_suits_the_model_unless_told_otherwise() -> None:
    assert settings_of().chunk_bytes == 0
    assert settings_of(chunk_kib=64).chunk_bytes == 65_536
    assert settings_of(chunk_kib=CHUNK_KIB_MAX).chunk_bytes == CHUNK_BYTES_MAX


def test_steps_have_one_phase_unless_told_otherwise() -> None:
    assert settings_of().step_atomicity is StepAtomicity.CHUNK
    assert notes_of() == ""


def test_what_bsp_has_no_use_for_is_said_and_kept_for_later() -> None:
    changes = {"is_staleness_scaled": True, "delay_compensation": 0.04}
    settings = settings_of(**changes)
    assert (settings.is_staleness_scaled, settings.delay_compensation) == (True, 0.04)
    assert "--staleness-scaling and --delay-compensation 0.04" in notes_of(**changes)
    assert notes_of(**changes, mode=Mode.ASP) == ""


@pytest.mark.parametrize(
    ("lease_ttl_ms", "grace_ms"), [(1_000, 100), (2_000, 200), (10_000, 500)]
)
def test_the_grace_for_reconnecting_is_a_part_of_the_lease(
    lease_ttl_ms: int, grace_ms: int
) -> None:
    assert settings_of(lease_ttl_ms=lease_ttl_ms).reconnect_grace_ms == grace_ms


@pytest.mark.parametrize(
    ("coordinator", "listen", "advertise", "is_told"),
    [
        ("127.0.0.1:7070", "127.0.0.1:0", None, False),
        ("192.168.0.7:7070", "127.0.0.1:0", None, True),
        ("192.168.0.7:7070", "192.168.0.8:0", None, False),
        ("192.168.0.7:7070", "127.0.0.1:0", "192.168.0.8:7071", False),
        ("192.168.0.7:7070", "0.0.0.0:0", "127.0.0.1:7071", True),
    ],
)
def test_a_shard_that_only_its_own_machine_reaches_says_so(
    coordinator: str, listen: str, advertise: str | None, is_told: bool
) -> None:
    config = ShardConfig(
        listen=ListenConfig(address=parse_address(listen), insecure=True),
        coordinator=parse_address(coordinator),
        advertise=parse_address(advertise) if advertise else None,
        state_dir=Path("state"),
    )
    config.validate()
    assert bool(config.unreachable_text) == is_told
