"""`deploy/monitoring` in a real Prometheus that scrapes a training job."""

import json
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.debian import require
from tests.doubles.children import Nursery, wait_until
from tests.doubles.free_addresses import free_ports
from tests.integration.monitoring_files import (
    MONITORING,
    RULES,
    panels,
    rules,
    selectors,
)
from tests.integration.processes import Processes

JOB: Final = "run7"
DATA_TIMEOUT_S: Final = 120.0

WORKER: Final = """
import sys
import time
import torch
import psworker

with psworker.connect() as ps:
    model = torch.nn.Linear(64, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    data = torch.utils.data.TensorDataset(torch.randn(512, 64))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = ps.prepare(model, optimizer, loader)
    for epoch in range(1_000_000):
        loader.set_epoch(epoch)
        for (batch,) in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ps.log(loss=loss)
            time.sleep(0.005)  # a step that is not all of a core
"""


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus, by its API."""

    port: int

    def ask(self, path: str, **parameters: str) -> Any:  # noqa: ANN401, JSON
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[Any]:
        """What an expression is now."""
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found

    def is_up(self) -> bool:
        try:
            targets = self.ask("targets")["activeTargets"]
        except OSError:
            return False
        return [each["health"] for each in targets] == ["up"] * 3


@pytest.fixture(scope="module")
def prometheus(
    tmp_path_factory: pytest.TempPathFactory, nursery: Nursery
) -> Iterator[Prometheus]:
    """One that scrapes a job while it trains."""
    program = require("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    ports = free_ports(5)
    admin = [f"127.0.0.1:{port}" for port in ports[:3]]
    configuration = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    configuration["rule_files"] = [str(RULES)]
    (scrape,) = configuration["scrape_configs"]
    assert scrape["job_name"] == JOB
    scrape["static_configs"] = [{"targets": admin}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    (folder / "worker.py").write_text(WORKER)
    with Processes(folder, nursery) as processes:
        processes.start_daemon(
            *("coordinator", "coordinator", f"--listen=127.0.0.1:{ports[3]}"),
            *("--shards=2", "--min-workers=2", "--mode=ssp", "--staleness=2"),
            *(f"--checkpoint-dir={folder / 'checkpoints'}", "--checkpoint-every=2s"),
            f"--admin-listen={admin[0]}",
        )
        address = processes.address("coordinator")
        for index in range(2):
            processes.start_daemon(
                *(f"shard-{index}", "shard", f"--coordinator={address}"),
                *(f"--index={index}", f"--admin-listen={admin[1 + index]}"),
            )
            worker = str(folder / "worker.py")
            processes.start(f"w{index}", worker, PS_COORDINATOR=address)
        log = (folder / "prometheus.log").open("wb")
        server = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{ports[4]}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            found = Prometheus(ports[4])
            wait_until(found.is_up, "a Prometheus with three targets", DATA_TIMEOUT_S)
            yield found
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
            log.close()


@pytest.mark.timeout(400)
def test_every_panel_has_data(prometheus: Prometheus) -> None:
    for title, expression in panels():
        concrete = expression.replace("$job", JOB).replace("$__rate_interval", "30s")

        def has_data(concrete: str = concrete) -> bool:
            values = [each["value"][1] for each in prometheus.values(concrete)]
            return bool(values) and "NaN" not in values

        wait_until(has_data, f"data for {title}: {concrete}", DATA_TIMEOUT_S)


@pytest.mark.timeout(400)
def test_every_rule_reads_data_and_none_fires(prometheus: Prometheus) -> None:
    for rule in rules():
        for selector in selectors(rule["expr"]):

            def has_data(selector: str = selector) -> bool:
                return bool(prometheus.values(selector))

            wait_until(has_data, f"data for {selector}", DATA_TIMEOUT_S)
    (group,) = prometheus.ask("rules")["groups"]
    assert {each["name"] for each in group["rules"]} == {r["alert"] for r in rules()}
    for each in group["rules"]:
        assert each["health"] == "ok", each
        assert each["state"] != "firing", each


SERIES: Final = {
    "ParamserverStraggler": ('ps_job_cause{cause="straggler"}', "1x20", "0x20"),
    "ParamserverNoProgress": ("ps_job_steps", "7x40", "0+5x40"),
    "ParamserverNotReady": ("ps_ready", "0x20", "1x20"),
    "ParamserverShardLost": ('ps_shard_up{shard="1"}', "1x5 0x15", "1x20"),
    "ParamserverDisk": ("ps_state_written", "1x5 0x15", "1x20"),
    "ParamserverCheckpointOld": (
        "ps_checkpoint_age_seconds",
        "3000+60x40",
        "0+60x40",
    ),
    "ParamserverCheckpointFailing": ("ps_checkpoint_failing", "1x20", "0x20"),
    "ParamserverEvictions": ("ps_job_evictions_total", "0+1x40", "0x10 1x30"),
    "ParamserverCallsRefused": (
        'ps_calls_refused_total{reason="unauthenticated"}',
        "0+600x20",
        "0+6x20",
    ),
}
"""For each alert a series, with values of each minute that fire it, and that don't."""

AT: Final = {"ParamserverNoProgress": "30m", "ParamserverCheckpointOld": "30m"}
"""Minutes after which it is looked at, where those are not 15."""


def test_promtool_takes_the_rules() -> None:
    promtool = require("prometheus", "promtool")
    subprocess.run([promtool, "check", "rules", RULES], check=True, timeout=30)
    configuration = MONITORING / "prometheus.yml"
    subprocess.run([promtool, "check", "config", configuration], check=True, timeout=30)


def test_each_alert_fires_when_it_should_and_not_else(tmp_path: Path) -> None:
    promtool = require("prometheus", "promtool")
    assert SERIES.keys() == {rule["alert"] for rule in rules()}
    # Texts are no part of this.
    bare = yaml.safe_load(RULES.read_text())
    for rule in bare["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(bare))
    running = {"series": 'ps_job_phase{phase="running"}', "values": "1x40"}
    cases = []
    for rule in bare["groups"][0]["rules"]:
        name = rule["alert"]
        series, firing, quiet = SERIES[name]
        labels = dict(part.split("=") for part in _labels(series))
        kept = {} if "cause" in labels else labels
        fired = {**rule["labels"], **{k: v.strip('"') for k, v in kept.items()}}
        if name == "ParamserverStraggler":
            fired["cause"] = "straggler"
        for values, expected in ((firing, [{"exp_labels": fired}]), (quiet, [])):
            cases.append(
                {
                    "interval": "1m",
                    "input_series": [running, {"series": series, "values": values}],
                    "alert_rule_test": [
                        {
                            "eval_time": AT.get(name, "15m"),
                            "alertname": name,
                            "exp_alerts": expected,
                        }
                    ],
                }
            )
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": cases}))
    done = subprocess.run(
        [promtool, "test", "rules", file], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _labels(series: str) -> list[str]:
    inside = series.partition("{")[2].rstrip("}")
    return inside.split(",") if inside else []
