"""Fuzzes readers of bytes from outside, guided by what of their code an input reaches.

    python -m tests.fuzz [TARGET...]     each for its share of FUZZ_SECONDS
    python -m tests.fuzz --seeds         writes real messages into the corpus again

What is found is left in the corpus as `crash-...`, so that tests fail until it is
mended. Inputs that reach something new are kept in `.fuzz`, for the next time.
"""

import os
import resource
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
CORPUS: Final = FOLDER / "corpus"
KEPT: Final = FOLDER.parents[1] / ".fuzz"
SECONDS_VARIABLE: Final = "FUZZ_SECONDS"
SECONDS_DEFAULT: Final = 3600.0
OURS: Final = ["pswire", "psserver", "psworker", "psctl"]
MEMORY_MAX: Final = 4 << 30


def main(arguments: list[str]) -> int:
    """Fuzzes each target in a process of its own, which libFuzzer ends."""
    if arguments[:1] == ["--seeds"]:
        from tests.fuzz.seeds import write_seeds

        print(f"{write_seeds()} seeds are in {CORPUS}")
        return 0
    import atheris

    with atheris.instrument_imports(include=OURS):
        from tests.fuzz.targets import TARGETS, load
    from tests.fuzz.files import scratch

    names = arguments or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        print(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
        return 2
    load()
    scratch()  # removed when this process ends
    tracemalloc.start()
    seconds = float(os.environ.get(SECONDS_VARIABLE, SECONDS_DEFAULT)) / len(names)
    failed = [name for name in names if not _run(name, seconds)]
    if failed:
        print(f"found: {', '.join(failed)}; the inputs are in {CORPUS}")
    return 1 if failed else 0


def _run(name: str, seconds: float) -> bool:
    """Fuzzes one target; whether nothing was found."""
    kept, corpus, log = KEPT / name, CORPUS / name, KEPT / f"{name}.log"
    kept.mkdir(parents=True, exist_ok=True)
    # All is imported once, by the parent.
    child = os.fork()
    if not child:
        options = (
            f"-max_total_time={max(1, round(seconds))}",
            f"-artifact_prefix={corpus}/",
            "-max_len=16384",
            "-timeout=30",
            "-rss_limit_mb=0",
            "-print_final_stats=1",
        )
        _fuzz(name, [*options, str(kept), str(corpus)], log)
    _, status = os.waitpid(child, 0)
    text = log.read_text(errors="replace")
    found = [line.split() for line in text.splitlines() if line.startswith("stat::")]
    figures = {words[0]: words[-1] for words in found}
    inputs = figures.get("stat::number_of_executed_units:", "?")
    print(f"{name:20} {inputs:>10} inputs", flush=True)
    if status:
        print(text[-3000:], flush=True)
    return not status


def _fuzz(name: str, options: Sequence[str], log: Path) -> None:
    """Becomes the process of a target; does not return."""
    import atheris

    from tests.fuzz.target import check
    from tests.fuzz.targets import TARGETS

    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    mapped = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_MAX,) * 2)
    target = TARGETS[name]
    atheris.Setup([sys.argv[0], *options], lambda data: check(target, data))
    atheris.Fuzz()  # ends the process, after an error by SystemExit


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
