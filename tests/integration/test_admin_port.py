"""What a job that trains tells by HTTP: its documents and its metrics."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from psserver.config import ListenConfig
from psserver.edge.admin import AdminPort
from pswire.addresses import Address
from tests.doubles.children import wait_until
from tests.integration.job import Job, connect

STEP_COUNT: Final = 3


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Of the coordinator and of a shard of a job with a member, which has stepped."""
    found: list[str] = []
    bind = AdminPort.bind

    def noted(port: AdminPort) -> None:
        bind(port)
        found.append(port.url)

    with (
        mock.patch.object(AdminPort, "bind", noted),
        Job(
            tmp_path_factory.mktemp("admin"),
            shard_count=1,
            admin=ListenConfig(address=Address("127.0.0.1", 0)),
        ) as job,
        connect(job, "w<0>") as ps,
    ):
        model = torch.nn.ParameterList([torch.ones(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = ps.prepare(model, optimizer)
        for _ in range(STEP_COUNT):
            model[0].grad = torch.ones(8)
            optimizer.step()
        yield found


def got(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def metrics(url: str) -> dict[str, float]:
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): value
        for family in text_string_to_metric_families(got(f"{url}metrics"))
        for sample in family.samples
        for value in [sample.value]
    }


def test_documents_are_those_of_psctl(urls: list[str]) -> None:
    status: dict[str, Any] = json.loads(got(f"{urls[0]}status"))
    assert status["schema_version"] == 2
    assert status["admin_url"] == urls[0]
    assert [each["worker_id"] for each in status["workers"]] == ["w<0>"]
    assert "points" in json.loads(got(f"{urls[0]}history"))
    events = json.loads(got(f"{urls[0]}events"))["events"]
    last = events[-1]["number"]
    rest = json.loads(got(f"{urls[0]}events?after={last}"))["events"]
    assert all(each["number"] > last for each in rest)


def test_a_scrape_of_each_daemon_says_what_the_job_has_done(urls: list[str]) -> None:
    assert len(urls) == 2
    wait_until(
        lambda: metrics(urls[0]).get("ps_job_steps") == STEP_COUNT, "the shard's report"
    )
    job, shard = map(metrics, urls)
    assert job["ps_job_phase running"] == 1
    assert job["ps_worker_clock w<0>"] == STEP_COUNT
    assert job["ps_ready"] == shard["ps_ready"] == 1
    assert shard["ps_shard_steps"] == STEP_COUNT
    assert shard["ps_shard_pushes_total applied"] == STEP_COUNT
    assert shard["process_resident_memory_bytes"] > 1e6
    assert any(name.startswith("ps_build_info shard ") for name in shard)
