"""How much memory this process may use: the machine's, or what a control group leaves.

Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from psserver.edge.memory_grant import MemoryGrant


def usable_memory(root: Path = Path("/")) -> MemoryGrant:
    """The least of the machine's memory and the limits of this process's groups.

    Processes with the same scope share it.

    Args:
        root: Where the kernel's files are.
    """
    found = [
        *_machine(root / "proc/meminfo"),
        *_limits(root, _groups(root / "proc/self/cgroup")),
    ]
    least = min(found, key=lambda grant: grant.byte_count, default=MemoryGrant())
    boot = _text(root / "proc/sys/kernel/random/boot_id")
    return MemoryGrant(least.byte_count, f"{boot}{least.scope}" if boot else "")


def _machine(meminfo: Path) -> Iterator[MemoryGrant]:
    for line in _text(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            yield MemoryGrant(int(value.split()[0]) << 10, "")


def _groups(listing: Path) -> Iterator[tuple[str, str, PurePosixPath]]:
    """Of each hierarchy that limits memory: its folder, the limit's file, the group."""
    for line in _text(listing).splitlines():
        number, controllers, path = line.split(":", 2)
        group = PurePosixPath(path)
        if number == "0" and not controllers:
            yield "sys/fs/cgroup", "memory.max", group
            yield "sys/fs/cgroup/unified", "memory.max", group
        elif "memory" in controllers.split(","):
            yield "sys/fs/cgroup/memory", "memory.limit_in_bytes", group


def _limits(
    root: Path, groups: Iterator[tuple[str, str, PurePosixPath]]
) -> Iterator[MemoryGrant]:
    """Limits of groups and of all above: each holds for what is below.

    A container may see the group's path of its host and the files of its own root: what
    is not there is passed over, and the root is looked at as well.
    """
    for folder, file, group in groups:
        for each in (group, *group.parents):
            text = _text(root / folder / each.relative_to("/") / file)
            if text.isdecimal():
                yield MemoryGrant(int(text), str(each))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
