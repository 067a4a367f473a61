"""A disk that misbehaves on demand: the preloaded library in `shim/`, built and steered from here."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.children import Child, running

SOURCE = Path(__file__).parent / "shim" / "disk_faults.c"
SITES = (
    "pwrite",
    "fsync",
    "renameat2",
    "renameat",
    "linkat",
    "create",
    "fchmod",
    "flock",
    "sync_file_range",
    "close",
    "unlinkat",
    "pread",
)
LAYOUT = f"=1024s256sqq8i{len(SITES)}i"
NO_SITE = -1
FOR_EVER = -1
HANGING_SECONDS = -1e-6
"""A delay that ends with the next change: a disk that hangs for as long as a test wants."""


class FaultyDisk:
    """The shared page that the library in the service looks at; see the C file for what the fields do."""

    def __init__(self, file: Path, root: Path, library: Path) -> None:
        self._file, self._root, self._library = file, root, library
        file.write_bytes(bytes(struct.calcsize(LAYOUT)))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), 0)
        self.heal()

    def heal(self, *, bytes_per_second: int = 0) -> None:
        """No call misbehaves from now on, and all counts start anew."""
        self._write(bytes_per_second=bytes_per_second)

    def fail(
        self,
        site: str,
        error: int = 0,
        *,
        match: str = "",
        nth: int = 1,
        times: int = 1,
        short_bytes: int = 0,
        delay_seconds: float = 0.0,
        carried_out: bool = False,
    ) -> None:
        """From the `nth` call of `site` on, `times` of them answer with `error`, come late or write less than they should."""
        self._write(match=match, delay_us=round(delay_seconds * 1e6))
        rest = (nth, times, error, short_bytes, int(carried_out), 0, 0)
        # The site last: it is what arms the others.
        struct.pack_into("=7i", self._memory, struct.calcsize("=1024s256sqqi"), *rest)
        struct.pack_into("=i", self._memory, struct.calcsize("=1024s256sqq"), SITES.index(site))

    @property
    def fired(self) -> int:
        """How many calls have misbehaved."""
        return int(struct.unpack_from(LAYOUT, self._memory)[11])

    def counts(self) -> dict[str, int]:
        """Calls below the folder since the last change."""
        return dict(zip(SITES, struct.unpack_from(LAYOUT, self._memory)[-len(SITES) :], strict=True))

    @contextmanager
    def under(self, arguments: Sequence[str]) -> Iterator[Child]:
        """A service whose files lie on this disk."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("LD_PRELOAD", str(self._library))
            environment.setenv("DISK_FAULTS_CONTROL", str(self._file))
            service = running(arguments)
            child = service.__enter__()
        try:
            yield child
        finally:
            self.heal()
            service.__exit__(None, None, None)

    def close(self) -> None:
        self._memory.close()

    def _write(self, *, match: str = "", bytes_per_second: int = 0, delay_us: int = 0) -> None:
        struct.pack_into("=i", self._memory, struct.calcsize("=1024s256sqq"), NO_SITE)
        fixed = (os.fsencode(self._root), match.encode(), bytes_per_second, delay_us)
        struct.pack_into(LAYOUT, self._memory, 0, *fixed, NO_SITE, *[0] * 7, *[0] * len(SITES))


@contextmanager
def faulty_disk(folder: Path, root: Path) -> Iterator[FaultyDisk]:
    """Builds the library in `folder`; skips where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the faulty disk with")
    library = folder / "disk_faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    root.mkdir(parents=True, exist_ok=True)
    disk = FaultyDisk(folder / "control", root.resolve(), library)
    try:
        yield disk
    finally:
        disk.close()


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own in `folder`, of `size` (as mount has it); skips where mounting is forbidden."""
    folder.mkdir()
    command = [shutil.which("mount") or "false", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is forbidden here: {done.stderr.strip() or 'mount is missing'}")
    try:
        yield folder
    finally:
        # Lazily: a service that has died badly must not keep the mount.
        subprocess.run(["umount", "--lazy", folder], check=True)


def name_of(error: int) -> str:
    return errno.errorcode.get(error, "none")
