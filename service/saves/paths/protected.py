"""What no client path may name: files that the service itself reads or writes. A save root that would hold one is refused at start.

A client that could name the registry, the keys, the settings or the weights could replace them with a file of its own. The state directory
belongs to the service alone, so no save root lies in it either: converted models are kept there, and its mode keeps clients out.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from service.config.settings import Settings


@dataclass(frozen=True)
class ProtectedPath:
    """A file or folder of the service, by the setting that names it. It need not exist yet."""

    setting: str
    path: Path
    no_roots_in_it: bool = False


def check_roots(settings: Settings) -> None:
    """Raises `ConfigError`, which names both settings, for a save root that would give away a file of the service."""
    named = [ProtectedPath("--state-dir", settings.state_dir, no_roots_in_it=True)]
    if settings.api_keys_file is not None:
        named.append(ProtectedPath("--api-keys-file", settings.api_keys_file))
    if settings.config_file is not None:
        named.append(ProtectedPath("--config", settings.config_file))
    _check(settings.save_root, named)


def check_model(settings: Settings, folder: Path) -> None:
    """The same for the model: what `--model` names where that is a path, the folder that it is loaded from, and what the files in there
    are links to. A save root in a model's folder is none of them.
    """
    named = [] if settings.model is None else [Path(settings.model)]
    files = (path for path in folder.iterdir() if path.is_file())
    _check(settings.save_root, [ProtectedPath("--model", path) for path in (*named, folder, *files)])


def _check(roots: Sequence[Path], protected: Sequence[ProtectedPath]) -> None:
    for root in roots:
        for place in protected:
            if _lies_in(place.path, root):
                raise ConfigError(f"{place.setting} {place.path} lies in --save-root {root}, where clients could replace it")
            if place.no_roots_in_it and _lies_in(root, place.path):
                raise ConfigError(f"--save-root {root} lies in {place.setting} {place.path}, which belongs to the service alone")


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether the path is the folder or leads through it, as it is written or with its links resolved. Neither need exist.

    Folders that exist are compared by device and inode: one that is mounted in two places, or written in another case, is still the same.
    """
    names, identity = {_absolute(folder), folder.resolve()}, _identity(folder)
    return any(step in names or (identity is not None and _identity(step) == identity) for step in _steps(path))


def _steps(path: Path) -> Iterator[Path]:
    for way in (_absolute(path), path.resolve()):
        yield way
        yield from way.parents


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute() would leave '..' segments in.


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
