"""Draws `demo.svg` beside this file: a run of the demo, as a terminal shows it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COMMAND = ["psctl", "demo", "--kill", "worker-1@40"]
FIRST_LINE_HIDDEN = "The snapshot, version"
WIDTH_CHARACTERS = 114
IMPORTANT = re.compile(r"was killed|next clock closed|test accuracy of")


def transcript() -> list[str]:
    """What the demo prints, without where the snapshot is and how to go on."""
    with TemporaryDirectory() as scratch:
        bin_folder = str(Path(sys.executable).parent)
        finished = subprocess.run(
            COMMAND,
            cwd=scratch,
            env=os.environ
            | {
                "NO_COLOR": "1",
                "PATH": bin_folder + os.pathsep + os.environ["PATH"],
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
    return finished.stdout.partition(FIRST_LINE_HIDDEN)[0].rstrip().splitlines()


def main() -> None:
    """Runs the demo and writes the picture."""
    with open(os.devnull, "w") as nowhere:
        console = Console(
            record=True, file=nowhere, width=WIDTH_CHARACTERS, highlight=False
        )
        console.print(Text("$ " + " ".join(COMMAND), style="bold green"))
        for line in transcript():
            console.print(
                Text(line, style="bold yellow" if IMPORTANT.search(line) else "")
            )
        svg = console.export_svg(title="psctl demo", theme=MONOKAI)
    # Any monospace font will do; rich would fetch one from the network.
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)
    Path(__file__).with_name("demo.svg").write_text(svg)


if __name__ == "__main__":
    main()
