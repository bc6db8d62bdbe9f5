"""Samples for Kubeflow Trainer and Argo: what their models and our commands take."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.doubles.installed import HEAVY, need
from tests.integration.crd_shapes import Manifest, check_shape
from tests.integration.deploy_files import Container, check_command_line

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RUNTIME = DEPLOY / "kubeflow" / "runtime.yaml"
WORKFLOW = DEPLOY / "argo" / "workflow.yaml"
SAMPLES = [RUNTIME, DEPLOY / "kubeflow" / "trainjob.yaml", WORKFLOW]


def read(path: Path) -> Manifest:
    manifest: Manifest = yaml.safe_load(path.read_text())
    return manifest


def runtime_jobs() -> dict[str, Any]:
    jobs = read(RUNTIME)["spec"]["template"]["spec"]["replicatedJobs"]
    return {each["name"]: each["template"] for each in jobs}


def workflow_containers() -> Iterator[Manifest]:
    """With parameters put in, as Argo does."""
    text = json.dumps(read(WORKFLOW)["spec"]["templates"])
    values = {
        p["name"]: p["value"] for p in read(WORKFLOW)["spec"]["arguments"]["parameters"]
    }
    values |= {"coordinator": "10.0.0.1", "index": "1"}
    filled = re.sub(
        r"\{\{(?:inputs|workflow)\.parameters\.(\w+)\}\}",
        lambda found: values[found[1]],
        text,
    )
    for template in json.loads(filled):
        if "container" in template:
            yield template["container"]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_its_own_model_takes_a_sample(path: Path) -> None:
    check_shape(read(path))


def test_kubernetes_takes_the_jobs_of_the_runtime() -> None:
    need("kubernetes_validate", HEAVY)
    import kubernetes_validate

    for name, template in runtime_jobs().items():
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name},
            "spec": template["spec"],
        }
        kubernetes_validate.validate(job, "1.37", strict=True)


def test_our_commands_take_the_options_of_the_runtime(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemons = {"job-coordinator-0-0.job:7070": "coordinator"}
    for name, template in runtime_jobs().items():
        (spec,) = template["spec"]["template"]["spec"]["containers"]
        container = Container(spec, f"job-{name}-0-1", 1)
        coordinator = container.environment["PS_COORDINATOR"]
        assert daemons[coordinator] == "coordinator"
        monkeypatch.setenv("PS_COORDINATOR", coordinator)
        check_command_line(container.command)
    assert "--advertise=job-shard-0-1.job:7070" in [
        word
        for template in runtime_jobs().values()
        for spec in template["spec"]["template"]["spec"]["containers"]
        for word in Container(spec, "job-shard-0-1", 1).command
    ]
    shards = runtime_jobs()["shard"]["spec"]["completions"]
    (coordinator_spec,) = runtime_jobs()["coordinator"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert f"--shards={shards}" in coordinator_spec["args"]


def test_our_commands_take_the_options_of_the_workflow() -> None:
    found = list(workflow_containers())
    assert len(found) == 4
    for spec in found:
        check_command_line(Container(spec, "pod", 1).command)


def test_containers_of_the_samples_have_no_rights() -> None:
    containers = [
        *workflow_containers(),
        *(
            spec
            for template in runtime_jobs().values()
            for spec in template["spec"]["template"]["spec"]["containers"]
        ),
    ]
    for spec in containers:
        assert spec["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
