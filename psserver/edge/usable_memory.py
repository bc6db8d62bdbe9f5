"""How much memory this process may use, and how much of it is left.

Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from psserver.edge.memory_grant import MemoryGrant

_KERNEL: Final = Path("/")


class _Version(NamedTuple):
    """The files of one version of control groups.

    Attributes:
        folder: Where its groups are.
        limit: Most bytes of a group.
        used: Bytes that it uses.
        reclaimable: In `memory.stat`, those of them that the kernel takes back.
    """

    folder: str
    limit: str
    used: str
    reclaimable: str


_SECOND: Final = ("memory.max", "memory.current", "inactive_file")
_VERSIONS: Final = (
    _Version("sys/fs/cgroup", *_SECOND),
    _Version("sys/fs/cgroup/unified", *_SECOND),
    _Version(
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def usable_memory(root: Path = _KERNEL) -> MemoryGrant:
    """The least of the machine's memory and the limits of this process's groups.

    Processes with the same scope share it.

    Args:
        root: Where the kernel's files are.
    """
    found = [
        *_machine(root / "proc/meminfo"),
        *(MemoryGrant(limit, str(group)) for _, limit, group in _limits(root)),
    ]
    least = min(found, key=lambda grant: grant.byte_count, default=MemoryGrant())
    boot = _text(root / "proc/sys/kernel/random/boot_id")
    return MemoryGrant(least.byte_count, f"{boot}{least.scope}" if boot else "")


def memory_left(root: Path = _KERNEL) -> tuple[int, str]:
    """Bytes that are left below the limit that is nearest, and which one that is."""
    left = [(_address_space_left(root), "RLIMIT_AS")]
    for version, limit, group in _limits(root):
        folder = root / version.folder / group.relative_to("/")
        left.append((limit - _used(folder, version), str(folder / version.limit)))
    return min(left)


def _address_space_left(root: Path) -> int:
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    pages, _, _ = _text(root / "proc/self/statm").partition(" ")
    if limit == resource.RLIM_INFINITY or not pages:
        return sys.maxsize
    return limit - int(pages) * os.sysconf("SC_PAGE_SIZE")


def _used(folder: Path, version: _Version) -> int:
    """Bytes that a group uses and that can't be had back."""
    used = _text(folder / version.used)
    if not used.isdecimal():
        return 0
    stat = dict(
        line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines()
    )
    return int(used) - int(stat.get(version.reclaimable, 0))


def _machine(meminfo: Path) -> Iterator[MemoryGrant]:
    for line in _text(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            yield MemoryGrant(int(value.split()[0]) << 10, "")


def _groups(listing: Path) -> Iterator[tuple[_Version, PurePosixPath]]:
    """This process's group of each hierarchy that limits memory."""
    *second, first = _VERSIONS
    for line in _text(listing).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            for version in second:
                yield version, PurePosixPath(path)
        elif "memory" in controllers.split(","):
            yield first, PurePosixPath(path)


def _limits(root: Path) -> Iterator[tuple[_Version, int, PurePosixPath]]:
    """Limits of groups and of all above: each holds for what is below.

    A container may see the group's path of its host and the files of its own root: what
    is not there is passed over, and the root is looked at as well.
    """
    for version, group in _groups(root / "proc/self/cgroup"):
        for each in (group, *group.parents):
            file = root / version.folder / each.relative_to("/") / version.limit
            text = _text(file)
            if text.isdecimal():
                yield version, int(text), each


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
