"""A folder that is made once and then shared: by processes that start at the same time and by all later ones."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError, ModelError

POLL_SECONDS = 0.2


def _ignore(_: str) -> None:
    pass


def _go_on() -> None:
    pass


@dataclass(frozen=True)
class Progress:
    """Of work that takes minutes: hears one line per step, and can end it."""

    report: Callable[[str], None] = _ignore
    check: Callable[[], None] = _go_on
    """Called several times a second by the thread that works: what it raises ends the work, which undoes what it has begun."""

    def __call__(self, line: str) -> None:
        self.check()
        self.report(line)


def user_data_directory() -> Path:
    """Strata's folder in the user's data directory (XDG base directories).

    Raises `ConfigError` for a user without a home: containers run under ids that no list of users has.
    """
    base = os.environ.get("XDG_DATA_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "share") / "strata"
    except RuntimeError:
        raise ConfigError("this user has no home directory to keep state in: give --state-dir, or set HOME") from None


def prepare_once(folder: Path, build: Callable[[Path], None], progress: Progress) -> Path:
    """`folder`, made by `build` where it doesn't exist yet; `build` fills an empty directory beside it.

    The folder appears complete and synced to disk, or not at all. Of several processes one builds and the others wait for it. What a
    killed process left behind is removed by the next. Raises `ModelError` where the directory can't be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock"), folder.name, progress):
            if not folder.is_dir():
                _build(folder, build)
    except OSError as error:
        raise ModelError(f"can't prepare the model in {folder}: {error}") from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    # Under the lock nobody else uses this name, so whatever stands there was left by a process that died.
    partial = folder.with_name(f"{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        build(partial)
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(folder.parent)


@contextmanager
def _locked(path: Path, what: str, progress: Progress) -> Iterator[None]:
    """Holds the lock file. The file itself stays: removing it would let two processes lock two files of one name."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not _try_lock(descriptor):
            progress(f"waiting for another process that prepares {what}")
            while not _try_lock(descriptor):
                progress.check()
                time.sleep(POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
