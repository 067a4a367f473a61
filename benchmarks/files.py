"""When a file can be read: servers that answer before it is complete hold its lock until then."""

import fcntl
import json
import time
from pathlib import Path

POLL_SECONDS = 0.001
LENGTH_BYTES = 8


def wait_until_readable(path: Path, timeout_seconds: float) -> None:
    """Waits for a shared lock on `PATH.lock`, where that exists, and until the file is as long as its header says.

    The first wait sleeps in the kernel, so it takes nothing from the server; it ends at the latest when the server does. Raises
    `TimeoutError` for a file that isn't complete so long after that.
    """
    lock = path.with_name(path.name + ".lock")
    if lock.exists():
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    until = time.monotonic() + timeout_seconds
    while not _complete(path):
        if time.monotonic() > until:
            raise TimeoutError(f"{path} was not complete after {timeout_seconds:.0f} s")
        time.sleep(POLL_SECONDS)


def _complete(path: Path) -> bool:
    """Whether all is there that the safetensors header speaks of."""
    try:
        with path.open("rb") as file:
            start = file.read(LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            header = file.read(length)
        if len(start) < LENGTH_BYTES or len(header) < length:
            return False
        end = max(entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__")
        return path.stat().st_size >= LENGTH_BYTES + length + int(end)
    except FileNotFoundError:
        return False
