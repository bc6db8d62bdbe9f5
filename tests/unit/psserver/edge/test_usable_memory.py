"""The least of the machine and all control groups, as the kernel's files have them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from psserver.edge.memory_grant import MemoryGrant
from psserver.edge.usable_memory import memory_left, usable_memory

GIB = 1 << 30
MEMINFO = f"MemTotal:       {16 << 20} kB\nMemFree:  1 kB\n"


def machine(root: Path, files: Mapping[str, str]) -> MemoryGrant:
    """What a process may use on a machine with these files of the kernel."""
    known = {"proc/meminfo": MEMINFO, "proc/sys/kernel/random/boot_id": "boot\n"}
    for name, text in {**known, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return usable_memory(root)


@pytest.mark.parametrize(
    ("files", "byte_count", "scope"),
    [
        ({}, 16 * GIB, "boot"),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/a/memory.max": "max\n",
            },
            2 * GIB,
            "boot/a/b",
        ),
        # A limit of a group above holds for all below, which share it.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/memory.max": f"{3 * GIB}\n",
            },
            3 * GIB,
            "boot/a",
        ),
        # In a container: the path is its host's, the files begin at its own root.
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/123\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            },
            GIB,
            "boot/",
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{GIB}\n",
            },
            GIB,
            "boot/x",
        ),
        # No limit in the first version is a huge one.
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            16 * GIB,
            "boot",
        ),
    ],
)
def test_the_least_counts(
    tmp_path: Path, files: Mapping[str, str], byte_count: int, scope: str
) -> None:
    assert machine(tmp_path, files) == MemoryGrant(byte_count, scope)


def test_without_any_of_the_files_it_is_not_known(tmp_path: Path) -> None:
    assert usable_memory(tmp_path) == MemoryGrant()


def test_this_machine_says_something() -> None:
    assert usable_memory().byte_count > 1 << 20


@pytest.mark.parametrize(
    ("files", "left", "limit"),
    [
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/b/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/b/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            2 * GIB,
            "sys/fs/cgroup/a/b/memory.max",
        ),
        # The nearest one counts, be it of a group above.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{7 * GIB}\n",
            },
            GIB,
            "sys/fs/cgroup/a/memory.max",
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{GIB - 7}\n",
                "sys/fs/cgroup/memory/x/memory.stat": "total_inactive_file 3\n",
            },
            10,
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes",
        ),
    ],
)
def test_what_is_left_below_the_nearest_limit(
    tmp_path: Path, files: Mapping[str, str], left: int, limit: str
) -> None:
    machine(tmp_path, files)
    assert memory_left(tmp_path) == (left, str(tmp_path / limit))
