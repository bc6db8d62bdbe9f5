"""Fuzzes readers of bytes from outside, guided by what of their code an input reaches.

    python -m tests.fuzz [TARGET...]     each for its share of FUZZ_SECONDS
    python -m tests.fuzz --seeds         writes real messages into the corpus again

What is found is left in the corpus as `crash-...`, so that tests fail until it is
mended. Inputs that reach something new are kept in `.fuzz`, for the next time.
"""

import os
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
CORPUS: Final = FOLDER / "corpus"
KEPT: Final = FOLDER.parents[1] / ".fuzz"
SECONDS_VARIABLE: Final = "FUZZ_SECONDS"
SECONDS_DEFAULT: Final = 3600.0
OURS: Final = ["pswire", "psserver", "psworker", "psctl"]
MEMORY_MAX: Final = 4 << 30
_ONE: Final = "--one"


def main(arguments: list[str]) -> int:
    """Fuzzes each target in a process of its own, which libFuzzer ends."""
    if arguments[:1] == ["--seeds"]:
        from tests.fuzz.seeds import write_seeds

        print(f"{write_seeds()} seeds are in {CORPUS}")
        return 0
    if arguments[:1] == [_ONE]:
        _fuzz(arguments[1], arguments[2:])
        return 0  # libFuzzer ends the process before
    from tests.fuzz.targets import TARGETS

    names = arguments or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        print(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
        return 2
    seconds = float(os.environ.get(SECONDS_VARIABLE, SECONDS_DEFAULT)) / len(names)
    failed = [name for name in names if not _run(name, seconds)]
    if failed:
        print(f"found: {', '.join(failed)}; the inputs are in {CORPUS}")
    return 1 if failed else 0


def _run(name: str, seconds: float) -> bool:
    """Fuzzes one target; whether nothing was found."""
    kept, corpus = KEPT / name, CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-artifact_prefix={corpus}/",
        "-max_len=16384",
        "-timeout=30",
        "-rss_limit_mb=0",
        "-print_final_stats=1",
    ]
    command = [sys.executable, "-m", "tests.fuzz", _ONE, name]
    with (KEPT / f"{name}.log").open("wb") as log:
        done = subprocess.run(
            [*command, *options, str(kept), str(corpus)],
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    text = (KEPT / f"{name}.log").read_text(errors="replace")
    figures = dict(
        line.removeprefix("stat::").split(":", 1)
        for line in text.splitlines()
        if line.startswith("stat::")
    )
    inputs = figures.get("number_of_executed_units", "?").strip()
    print(f"{name:20} {inputs:>10} inputs", flush=True)
    if done.returncode:
        print(text[-3000:], flush=True)
    return done.returncode == 0


def _fuzz(name: str, options: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=OURS):
        from tests.fuzz.target import check
        from tests.fuzz.targets import TARGETS
    from psserver.shard.tensors.supported_optimizers import load_optimizers

    target = TARGETS[name]
    load_optimizers()  # seconds of imports, at the first checkpoint that is read
    tracemalloc.start()
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() + MEMORY_MAX,) * 2)
    atheris.Setup([sys.argv[0], *options], lambda data: check(target, data))
    atheris.Fuzz()


def _mapped_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
