"""Regenerates the committed stubs of `pswire.v1`, or checks that they are current.

Run it in an environment made from `constraints-protogen.txt`: the generator is
pinned low on purpose, since generated code refuses a protobuf runtime older
than its generator. Stubs of grpcio-tools 1.74 import on protobuf 6.31 to 7.x.

    python protos/generate.py            write the stubs
    python protos/generate.py --check    exit 1 and name what differs
"""

import argparse
import filecmp
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("pswire") / "v1"
TOOLS_VERSION = "1.74.0"


def generate(target: Path) -> list[Path]:
    """Writes all stubs below `target` and returns their paths relative to it."""
    import grpc_tools
    from grpc_tools import protoc

    found = metadata.version("grpcio-tools")
    if found != TOOLS_VERSION:
        raise SystemExit(
            f"grpcio-tools {found} is installed, stubs are made with {TOOLS_VERSION}: "
            "run `make stubs`, which uses an environment of its own"
        )
    protos = sorted(str(p.relative_to(ROOT)) for p in (ROOT / PACKAGE).glob("*.proto"))
    include = Path(grpc_tools.__file__).parent / "_proto"
    # Named by path, so that the environment need not be activated.
    scripts = Path(sys.executable).parent
    code = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"-I{include}",
            *(
                f"--plugin={name}={scripts / name}"
                for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
            ),
            f"--python_out={target}",
            f"--mypy_out=quiet:{target}",
            f"--grpc_python_out={target}",
            f"--mypy_grpc_out=quiet:{target}",
            *protos,
        ]
    )
    if code != 0:
        raise SystemExit(code)
    # Files without a service get an empty *_pb2_grpc.py: noise, left out.
    made = sorted((target / PACKAGE).iterdir())
    return [
        path.relative_to(target)
        for path in made
        if "_pb2_grpc" not in path.name or "_service_" in path.name
    ]


def stale_stubs(made: list[Path], fresh: Path) -> list[str]:
    """Names of stubs that are missing, superfluous or different from `fresh`."""
    committed = {p.relative_to(ROOT) for p in (ROOT / PACKAGE).glob("*_pb2*")}
    stale = {str(path) for path in committed.symmetric_difference(made)}
    for path in committed.intersection(made):
        if not filecmp.cmp(ROOT / path, fresh / path, shallow=False):
            stale.add(str(path))
    return sorted(stale)


def main() -> int:
    """Writes or checks, as the command line says, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        made = generate(fresh)
        if arguments.check:
            stale = stale_stubs(made, fresh)
            for name in stale:
                print(f"stale stub: {name} (run `make stubs`)", file=sys.stderr)
            return 1 if stale else 0
        for old in (ROOT / PACKAGE).glob("*_pb2*"):
            old.unlink()
        for path in made:
            shutil.copyfile(fresh / path, ROOT / path)
    print(f"{len(made)} stubs written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
