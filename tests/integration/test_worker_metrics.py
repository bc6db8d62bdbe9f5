"""The metrics of a worker by HTTP, where its script or environment asks for them."""

import logging
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import psworker
from pswire.addresses import Address
from psworker import metrics_port
from psworker.config import find_admin
from psworker.errors import ConfigurationError
from psworker.metrics_port import WORKER
from tests.doubles.children import wait_until
from tests.integration.job import Job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("worker-metrics"), shard_count=1) as made:
        yield made


def got(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_worker_tells_what_its_script_does(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "psworker")
    monkeypatch.setattr("psworker.member.session.WORK_INTERVAL_S", 0.05)
    with psworker.connect(job.address, "w0", admin_listen="127.0.0.1:0") as ps:
        (line,) = (m for m in caplog.messages if m.startswith("metrics of this worker"))
        url = line.rpartition(" ")[2].removesuffix("metrics")
        assert got(f"{url}healthz") == (200, "ok\n")
        assert got(f"{url}readyz")[0] == 503
        assert got(f"{url}other")[0] == 404
        model: Any = torch.nn.ParameterList([torch.ones(8)])
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        for _ in range(3):
            model[0].grad = torch.ones(8)
            optimizer.step()
            ps.log(loss=0.5)
        assert got(f"{url}readyz") == (200, "ready\n")

        def found() -> dict[str, float]:
            return {
                " ".join([sample.name, *sample.labels.values()]): sample.value
                for family in text_string_to_metric_families(got(f"{url}metrics")[1])
                for sample in family.samples
            }

        wait_until(
            lambda: (
                "ps_worker_logged loss" in found()
                and found()["ps_worker_steps_total"] == 3
            ),
            "a report",
        )
        values = found()
        assert values["ps_worker_info w0"] == 1
        assert values["ps_worker_steps_total"] == values["ps_worker_clocks"] == 3
        assert values["ps_worker_logged loss"] == 0.5
        assert values["ps_worker_sent_bytes_total"] > 0
        assert values["ps_worker_seconds_total wait"] > 0
        named = {name.partition(" ")[0] for name in values}
        assert {metric.name for metric in WORKER} <= named
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=30)


def test_no_more_requests_than_so_many_are_answered_at_a_time(
    job: Job, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "psworker")
    monkeypatch.setattr(metrics_port, "CONNECTION_COUNT_MAX", 2)
    # Longer than this test waits: a silent connection ends like one without a place.
    monkeypatch.setattr(metrics_port._Handler, "timeout", 300)
    with psworker.connect(job.address, "w1", admin_listen="127.0.0.1:0"):
        (line,) = (m for m in caplog.messages if m.startswith("metrics of this worker"))
        url = line.rpartition(" ")[2].removesuffix("metrics")
        port = int(url.rpartition(":")[2].strip("/"))

        def connected() -> socket.socket:
            return socket.create_connection(("127.0.0.1", port), timeout=30)

        held = [connected() for _ in range(2)]
        with connected() as refused:
            assert refused.recv(1) == b"", "it is turned away"
        for each in held:
            each.close()
        wait_until(lambda: _is_answered(f"{url}healthz"), "a free place")
        monkeypatch.setattr(metrics_port._Handler, "timeout", 0.1)
        with connected() as silent:
            assert silent.recv(1) == b"", "it has said nothing in time"


def _is_answered(url: str) -> bool:
    try:
        return got(url)[0] == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def test_a_port_in_use_is_no_reason_not_to_train(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with psworker.connect(job.address, "w2", admin_listen=address):
            assert any("training goes on without them" in m for m in caplog.messages)


@pytest.mark.parametrize(
    ("given", "environ", "address"),
    [
        (None, {}, None),
        (None, {"PS_ADMIN_LISTEN": "off"}, None),
        ("off", {"PS_ADMIN_LISTEN": "127.0.0.1:9"}, None),
        (None, {"PS_ADMIN_LISTEN": "127.0.0.1:9"}, Address("127.0.0.1", 9)),
        ("[::1]:90", {"PS_LOCAL_RANK": "3"}, Address("::1", 93)),
        ("127.0.0.1:0", {"PS_LOCAL_RANK": "3"}, Address("127.0.0.1", 0)),
    ],
)
def test_where_it_is_served(
    given: str | None, environ: dict[str, str], address: Address | None
) -> None:
    assert find_admin(given, environ) == address


def test_what_is_no_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="admin_listen"):
        find_admin("somewhere", {})
