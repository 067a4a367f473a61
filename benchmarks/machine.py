"""What the figures were measured on: without it they can't be compared with anybody else's."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from engine.device.host import usable_cpus

MATRIX_SIZE = 2048
DISK_BYTES = 256 << 20
MEMORY_BYTES = 512 << 20
"""Read to find the rate of memory: more than any processor keeps in its caches."""
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Machine:
    """Facts of the machine, and rates measured in the same run as everything else."""

    processor: str
    cores: int
    torch_threads: int
    memory_bytes: int
    versions: dict[str, str]
    matrix_gflops: float
    disk_bytes_per_second: float
    memory_bytes_per_second: float
    load_before: float
    """Of the last minute, before the benchmark began: other work on the machine spoils the figures."""


def look(directory: Path) -> Machine:
    """Measures for some seconds; `directory` is where the disk is tried."""
    load_before, _, _ = os.getloadavg()
    return Machine(
        processor=_processor(),
        cores=usable_cpus(),
        torch_threads=torch.get_num_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        versions={name: _version(name) for name in ("strata-server", "torch", "transformers", "safetensors")},
        matrix_gflops=matrix_gflops(),
        disk_bytes_per_second=disk_rate(directory),
        memory_bytes_per_second=memory_rate(),
        load_before=load_before,
    )


def matrix_gflops(tries: int = 5) -> float:
    """The best of some products of two square float32 matrices, in 10^9 operations per second."""
    left = torch.rand(MATRIX_SIZE, MATRIX_SIZE)
    best = min(_seconds(lambda: torch.mm(left, left)) for _ in range(tries))
    return 2 * MATRIX_SIZE**3 / best / 1e9


def memory_rate(tries: int = 5) -> float:
    """Bytes per second that all threads together read at best, adding up numbers that lie one after the other."""
    numbers = torch.ones(MEMORY_BYTES // 4)
    return MEMORY_BYTES / min(_seconds(numbers.sum) for _ in range(tries))


def synced_write_seconds(directory: Path, size: int, tries: int = 9) -> float:
    """The median time of writing so few bytes into a new file and syncing it."""
    path, content = directory / "synced-write", os.urandom(size)
    seconds = []
    for _ in range(tries):
        started = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
        seconds.append(time.perf_counter() - started)
        path.unlink()
    return statistics.median(seconds)


def disk_rate(directory: Path) -> float:
    """Bytes per second of a plain write that ends with an fsync."""
    path = directory / "disk-rate"
    chunk = os.urandom(CHUNK_BYTES)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(DISK_BYTES // CHUNK_BYTES):
            file.write(chunk)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return DISK_BYTES / seconds


def rss_bytes(pid: int) -> int:
    """Resident memory of a process, as it is now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reset_peak_rss(pid: int) -> None:
    """Starts the kernel's high-water mark of a process and of its descendants anew (Linux; elsewhere it does nothing)."""
    for process in _family(pid):
        with suppress(OSError):
            Path(f"/proc/{process}/clear_refs").write_text("5")


def peak_rss_bytes(pid: int) -> int | None:
    """The high-water marks of resident memory of a process and its descendants, added up; None where the system doesn't tell."""
    peaks = [peak for process in _family(pid) if (peak := _peak_of(process)) is not None]
    return sum(peaks) if peaks else None


def _peak_of(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0].split()[1]) * 1024 if lines else None


def _family(pid: int) -> list[int]:
    """The process, its children and theirs."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name, in brackets, may hold anything; the parent is the second field behind it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    family = [pid]
    for member in family:
        family += children.get(member, ())
    return family


def _seconds(what: Callable[[], torch.Tensor]) -> float:
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
