"""What this process may use of the machine: its control groups and its affinity may leave it less than there is."""

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),  # version 2
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1, where no limit is a huge one
)


def available_memory(cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """Bytes that this process may still take: what the machine has available, or what the tightest of its control groups leaves.

    Page cache that the kernel drops before it runs out (`inactive_file`) does not count as used.
    """
    remainders = [left for group in _groups("memory", cgroups, proc) if (left := _memory_left(group)) is not None]
    return max(0, min([_machine_memory(proc), *remainders]))


def usable_cpus(cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """Processors that this process can keep busy, at least 1: its affinity, or the smallest quota of its control groups, rounded down."""
    quotas = [quota for group in _groups("cpu", cgroups, proc) if (quota := _cpu_quota(group)) is not None]
    return max(1, int(min([Fraction(len(os.sched_getaffinity(0))), *quotas])))


def _machine_memory(proc: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _memory_left(group: Path) -> int | None:
    """None without a limit."""
    for limit_file, used_file, droppable in _MEMORY_FILES:
        limit, used = _number(_text(group / limit_file)), _number(_text(group / used_file))
        if limit is not None and used is not None:
            return limit - max(0, used - _field(group / "memory.stat", droppable))
    return None


def _cpu_quota(group: Path) -> Fraction | None:
    """Processors' worth of time; None without a limit, which is `max` in version 2 and -1 in version 1."""
    both = _text(group / "cpu.max").split() or [_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")]
    quota, period = (_number(text) for text in both)
    return Fraction(quota, period) if quota and period else None


def _groups(controller: str, cgroups: Path, proc: Path) -> Iterator[Path]:
    """Folders of the process's own control group and of those around it, in both versions; some may not exist."""
    for line in _text(proc / "self" / "cgroup").splitlines() or ["0::/", f"1:{controller}:/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2; beside version 1 it is mounted in a folder of its own
            mounts = [cgroups, cgroups / "unified"]
        elif controller in controllers.split(","):
            mounts = [cgroups / controllers, cgroups / controller]
        else:
            continue
        for mount in mounts:
            yield from _chain(mount, path)


def _chain(mount: Path, path: str) -> Iterator[Path]:
    """The group and its ancestors. Of the path a container may see the last parts alone, or none: its own group is the mount then."""
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts:  # outside of what this process was given to see
        parts = ()
    while parts and not mount.joinpath(*parts).is_dir():
        parts = parts[1:]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _text(path: Path) -> str:
    """What a file says; nothing where there is none, or none that may be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int:
    fields = dict(line.split(maxsplit=1) for line in _text(path).splitlines())
    return int(fields.get(name, 0))
