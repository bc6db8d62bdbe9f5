"""Reads the files of `deploy/` into command lines that run on this machine."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import typer.core
import yaml

from psctl.__main__ import app as psctl
from psserver.__main__ import app as psserver
from psworker.__main__ import app as psworker

INSTALLED = "/opt/paramserver/bin/"
SCRIPTS = Path(sys.executable).parent


@dataclass(frozen=True, slots=True)
class Unit:
    """What this project uses of a systemd unit.

    Attributes:
        settings: The last value of each key, over all sections.
    """

    settings: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> "Unit":
        settings: dict[str, str] = {}
        for line in path.read_text().splitlines():
            if re.match(r"[A-Z]\w+=", line):
                key, _, value = line.partition("=")
                settings[key] = value
        return cls(settings)

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """The variables of the service, of which those given win."""
        said = shlex.split(self.settings["Environment"])
        return {**dict(word.split("=", 1) for word in said), **variables}

    def command(self, variables: Mapping[str, str], *, instance: str = "") -> list[str]:
        """The command of `ExecStart=`, as systemd would expand it.

        Args:
            variables: What an `EnvironmentFile=` says, and `STATE_DIRECTORY`.
            instance: What comes after the `@` in the name of the service.
        """
        environment = self.environment(variables)
        words = []
        for word in self.settings["ExecStart"].replace("%i", instance).split():
            if re.fullmatch(r"\$\w+", word):
                words += environment[word[1:]].split()
            else:
                words.append(
                    re.sub(r"\$\{(\w+)\}", lambda found: environment[found[1]], word)
                )
        assert words[0].startswith(INSTALLED)
        return [str(SCRIPTS / words[0].removeprefix(INSTALLED)), *words[1:]]


def compose_command(
    service: Mapping[str, Any],
    *,
    ports: Mapping[str, int],
    folders: dict[str, str],
) -> list[str]:
    """The command of a service, with its addresses and folders as they are here.

    Args:
        service: Of the compose file.
        ports: Ports to use for those that the file names.
        folders: Folders to use for those that the file mounts.
    """
    words = []
    for word in service["command"]:
        word = re.sub(
            r"\b(?:coordinator|shard-\d|0\.0\.0\.0|127\.0\.0\.1):(\d+)",
            lambda found: f"127.0.0.1:{ports[found[1]]}",
            word,
        )
        for mounted, here in folders.items():
            word = re.sub(rf"(?<![\w.]){mounted}(?=/|$)", here, word)
        words.append(word)
    return [str(SCRIPTS / words[0]), *words[1:]]


def read_compose(path: Path) -> dict[str, dict[str, Any]]:
    """Services of a compose file, by name."""
    services: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["services"]
    return services


@dataclass(frozen=True, slots=True)
class Container:
    """The container of a pod, in a manifest of Kubernetes.

    Attributes:
        spec: Of the container.
        pod: Name of the pod.
        index: Its number in its StatefulSet or Job.
    """

    spec: Mapping[str, Any]
    pod: str
    index: int

    @property
    def environment(self) -> dict[str, str]:
        """Variables, as the kubelet sets them."""
        fields = {
            "metadata.name": self.pod,
            "metadata.labels['apps.kubernetes.io/pod-index']": str(self.index),
            "metadata.labels['batch.kubernetes.io/job-completion-index']": str(
                self.index
            ),
            "metadata.labels['jobset.sigs.k8s.io/jobset-name']": "job",
            "status.podIP": "10.0.0.7",
        }
        found: dict[str, str] = {}
        for variable in self.spec["env"]:
            if "valueFrom" in variable:
                path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                found[variable["name"]] = fields[path]
            else:
                found[variable["name"]] = _with_variables(variable["value"], found)
        # Added by the controller of Jobs, behind the others.
        return {**found, "JOB_COMPLETION_INDEX": str(self.index)}

    @property
    def command(self) -> list[str]:
        """Its command line, with variables put in as the kubelet does."""
        environment = self.environment
        return [
            _with_variables(word, environment)
            for word in (*self.spec["command"], *self.spec["args"])
        ]


def _with_variables(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], text)


def check_command_line(words: Sequence[str]) -> None:
    """Has our own commands read a command line, without running it.

    Raises:
        click.UsageError: An option is unknown, is missing or has a wrong value.
    """
    name, *arguments = words
    commands = {"psserver": psserver, "psworker": psworker, "psctl": psctl}
    command = typer.main.get_command(commands[name])
    while isinstance(command, typer.core.TyperGroup):
        verb, *arguments = arguments
        command = command.commands[verb]
    command.make_context(name, arguments)
