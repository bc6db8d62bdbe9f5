"""Reads the files of `deploy/monitoring/`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

MONITORING: Final = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
RULES: Final = MONITORING / "rules.yml"


def panels() -> Iterator[tuple[str, str]]:
    """Title and expression of each curve of the dashboard."""
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def rules() -> list[dict[str, Any]]:
    """The alert rules."""
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def selectors(expression: str) -> list[str]:
    """What an expression reads: names of metrics, with what their labels must be."""
    pattern = r"\b(?:ps|process)_\w+(?:\{[^}]*\})?"
    return re.findall(pattern, expression)
