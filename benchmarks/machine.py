"""What the figures were measured on: without it they can't be compared with anybody else's."""

import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

MATRIX_SIZE = 2048
DISK_BYTES = 256 << 20
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Machine:
    """Facts of the machine, and two rates measured in the same run as everything else."""

    processor: str
    cores: int
    torch_threads: int
    memory_bytes: int
    versions: dict[str, str]
    matrix_gflops: float
    disk_bytes_per_second: float
    load_before: float
    """Of the last minute, before the benchmark began: other work on the machine spoils the figures."""


def look(directory: Path) -> Machine:
    """Measures for some seconds; `directory` is where the disk is tried."""
    load_before, _, _ = os.getloadavg()
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        torch_threads=torch.get_num_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        versions={name: _version(name) for name in ("strata-server", "torch", "transformers", "safetensors")},
        matrix_gflops=matrix_gflops(),
        disk_bytes_per_second=disk_rate(directory),
        load_before=load_before,
    )


def matrix_gflops(tries: int = 5) -> float:
    """The best of some products of two square float32 matrices, in 10^9 operations per second."""
    left = torch.rand(MATRIX_SIZE, MATRIX_SIZE)
    best = min(_seconds_of_product(left) for _ in range(tries))
    return 2 * MATRIX_SIZE**3 / best / 1e9


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


def reset_peak_rss(pid: int) -> None:
    """Starts the kernel's high-water mark of a process anew (Linux; elsewhere it does nothing)."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except OSError:
        return


def peak_rss_bytes(pid: int) -> int | None:
    """The high-water mark of a process's resident memory; None where the system doesn't tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    lines = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0].split()[1]) * 1024 if lines else None


def _seconds_of_product(matrix: torch.Tensor) -> float:
    started = time.perf_counter()
    torch.mm(matrix, matrix)
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
