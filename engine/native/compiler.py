"""Finds the compiled kernels, or compiles them: once per processor family and version of the sources, in a second or two.

`python -m engine.native.compiler DIRECTORY` compiles them for every family of this architecture beforehand, for an image that has no
compiler.
"""

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.device.resolve import cpu_flags
from engine.errors import EngineError

SOURCES = ("kernels.c", "typed.h", "prompts.h")
FLAGS = ("-O3", "-fopenmp", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
"""Not `-ffast-math`: NaN and infinities must come out as they went in."""
PREBUILT = Path(__file__).parent / "prebuilt"


class NoKernels(EngineError):
    """Why there are no compiled kernels."""


@dataclass(frozen=True)
class Family:
    """Processors that run the same code."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    """What the kernel calls the processor's features (`/proc/cpuinfo`)."""


_X86_64_V3 = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
FAMILIES = {
    "x86_64": (
        Family(
            "x86-64-v4",
            ("-march=x86-64-v4", "-mprefer-vector-width=512"),
            frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}) | _X86_64_V3,
        ),
        Family("x86-64-v3", ("-march=x86-64-v3",), _X86_64_V3),
    ),
    "aarch64": (Family("armv8-a", ("-march=armv8-a",), frozenset({"asimd"})),),
}
"""By architecture, the best first."""


def find_library(cache: Path | None = None) -> Path:
    """The compiled kernels for this processor: beforehand, earlier, or now. Raises `NoKernels`."""
    family = _family(FAMILIES.get(platform.machine(), ()), cpu_flags())
    try:
        name = f"{family.name}-{_digest(family)}.so"
        if (PREBUILT / name).exists():
            return PREBUILT / name
        library = (cache or _user_cache()) / name
        if not library.exists():
            compile_library(family, library)
        _check_owner(library)
    except OSError as error:
        raise NoKernels(f"{error.filename} can't be read: {error.strerror}") from error
    return library


def compile_library(family: Family, library: Path) -> None:
    """Compiles into place atomically, so that two processes may do it at once. Raises `NoKernels`."""
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if compiler is None:
        raise NoKernels("there is no C compiler (gcc)")
    folder = Path(__file__).parent
    try:
        library.parent.mkdir(0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".compile-") as directory:
            made = Path(directory) / library.name
            command = [compiler, *FLAGS, *family.flags, str(folder / SOURCES[0]), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise NoKernels(f"{compiler} failed: {done.stderr.strip()[:500]}")
            made.chmod(0o755)  # whatever the umask: only this user may change what it will run
            _put_on_disk(made)
            made.replace(library)
    except OSError as error:
        raise NoKernels(f"they could not be compiled into {library.parent}: {error.strerror}") from error


def _put_on_disk(file: Path) -> None:
    """So that no half of it stands under its name after a power cut, for ever."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _check_owner(library: Path) -> None:
    """What is loaded runs as this user, so nobody else may have put it there or be able to. Raises `NoKernels`, `OSError`."""
    for path in (library, library.parent):
        found = path.stat()
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
            raise NoKernels(f"{path} belongs to another user, or others may write to it")


def _family(families: Sequence[Family], flags: frozenset[str]) -> Family:
    for family in families:
        if family.needs <= flags:
            return family
    raise NoKernels(f"this processor ({platform.machine()}) is none they are written for")


def _digest(family: Family) -> str:
    digest = hashlib.sha256(repr((FLAGS, family.flags)).encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


def _user_cache() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strata" / "kernels"
    except RuntimeError as error:
        raise NoKernels("this user has no home directory to compile them into: set XDG_CACHE_HOME or HOME") from error


def main(directory: str) -> None:
    """Compiles for every family of this architecture."""
    for family in FAMILIES.get(platform.machine(), ()):
        library = Path(directory) / f"{family.name}-{_digest(family)}.so"
        compile_library(family, library)
        print(library)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(PREBUILT))
