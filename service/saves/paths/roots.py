"""The allowed save roots: where client paths may lead, and how they are opened (contract section 7)."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from engine.saves.lock import probe_flock
from engine.saves.publish import probe_publishing
from service.errors import BadPath, NotFound, ServiceError
from service.saves.paths.directories import OPEN_DIRECTORY, DirectoryCursor
from service.saves.paths.names import MAX_PATH_BYTES, PARAM, ClientPathMap, Parts, bad_path, check_names, forbidden, parse


@dataclass(frozen=True)
class OpenTarget:
    """A name in an open directory. The holder of the target owns the descriptor."""

    directory_fd: int
    name: str
    path: str
    """As the server sees it, for records and messages; files are opened by descriptor and name."""


@dataclass(frozen=True)
class Root:
    """One allowed root, resolved once: what its name leads to later is of no interest."""

    path: str
    fd: int
    prefixes: tuple[Parts, ...]
    """Under which absolute paths it is known: resolved, and as the operator wrote it."""


class SaveRoots:
    """The places where files may be made. Methods may be called from any thread; they wait for the disk."""

    def __init__(
        self,
        roots: Sequence[str],
        *,
        lock_files: bool = True,
        umask: int | None = None,
        client_path_map: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Makes the roots that are missing and probes each: publishing by rename or link, and `flock` unless `lock_files` is off.

        `umask` is for the directories that are made; None leaves them to the process's umask and to default ACLs. Raises `ConfigError`.
        """
        if not roots:
            raise ConfigError("--save-root: at least one folder is needed")
        self._umask = umask
        self._map = ClientPathMap(client_path_map)
        self._roots: list[Root] = []
        self._renumbered: set[tuple[int, int]] = set()
        """Device numbers that a file system had and has now."""
        try:
            for path in roots:
                self._add(path, lock_files)
        except BaseException:
            self.close()
            raise
        prefixes = [(prefix, root) for root in self._roots for prefix in root.prefixes]
        # The longest first, so that a root inside another one is opened by its own descriptor.
        self._prefixes = sorted(prefixes, key=lambda pair: -len(pair[0]))

    @property
    def roots(self) -> tuple[Root, ...]:
        """The default root first."""
        return tuple(self._roots)

    def close(self) -> None:
        for root in self._roots:
            os.close(root.fd)
        self._roots.clear()

    def root_of(self, path: str) -> str:
        """The root that a record's path lies below, by its text alone; empty where that is not configured (any more)."""
        try:
            return self._find(parse(path).parts)[0].path
        except ServiceError:
            return ""

    def root_of_client(self, path: str | None) -> str:
        """The root that a client's path leads to, by its text alone. Raises `BadPath`, `ForbiddenPath`."""
        return self._place(path)[0].path

    def to_client(self, path: str) -> str:
        """A path of the server as clients are to see it."""
        return self._map.to_client(path)

    def resolve(self, path: str | None, save_id: str, *, directory_only: bool = False) -> OpenTarget:
        """Opens the directory for a client's path, making what is missing; nothing is made for a path that is refused.

        None, an existing directory and a path that ends in a slash get the name `<save_id>.safetensors`. With `directory_only` any
        other path is refused. Raises `BadPath`, `ForbiddenPath`, `DiskFull`.
        """
        root, parts, directory = self._place(path)
        if os.fstat(root.fd).st_nlink == 0:
            raise ServiceError("the save root has been removed", param=PARAM, code="io_error")
        with DirectoryCursor(root.fd, self._umask) as cursor:
            parents = parts if directory else parts[:-1]
            missing = cursor.enter(parents)
            if not directory and not missing and cursor.is_directory(parts[-1]):
                parents, directory = parts, True
                missing = cursor.enter(parts[-1:])
            if directory_only and not directory:
                raise bad_path("must name a directory where a request makes more than one file")
            name = f"{save_id}.safetensors" if directory else parts[-1]
            full = _join(root, (*parents, name))
            cursor.make(missing)
            cursor.check_file(name)
            return OpenTarget(cursor.take(), name, full)

    def locate(self, path: str) -> OpenTarget:
        """Opens the directory of a path from a record; makes nothing. Raises `NotFound`, `BadPath`, `ForbiddenPath`."""
        root, parts = self._find(parse(path).parts)
        if not parts:
            raise BadPath("a save root is not a file", param=PARAM)
        with DirectoryCursor(root.fd, self._umask) as cursor:
            if cursor.enter(parts[:-1]):
                raise NotFound("the directory of the file is gone")
            return OpenTarget(cursor.take(), parts[-1], _join(root, parts))

    def device_at(self, path: str) -> int | None:
        """The device number of the file system that a path from a record leads to now, by the last of its directories that is there; None
        for a path below no root.
        """
        try:
            root, parts = self._find(parse(path).parts)
        except ServiceError:
            return None
        with DirectoryCursor(root.fd, self._umask) as cursor:
            with contextlib.suppress(ServiceError):
                cursor.enter(parts[:-1])
            return os.fstat(cursor.fd).st_dev

    def is_same_file_system(self, device: int, now: int) -> bool:
        """Whether `now` is the device number of the file system that had the number `device`."""
        return device == now or (device, now) in self._renumbered

    def recognize(self, device: int, now: int) -> None:
        """A file that was put on `device` was found on `now`: a mount, or a start of the machine, has given its file system that number."""
        self._renumbered.add((device, now))

    def _place(self, path: str | None) -> tuple[Root, Parts, bool]:
        """The root, the components below it, and whether they name a directory. Looks at text only."""
        if path is None:
            return self._roots[0], (), True
        client = parse(path)
        root, parts = self._find(self._map.to_server(client.parts)) if client.absolute else (self._roots[0], client.parts)
        directory = client.directory or not parts
        check_names(parts if directory else parts[:-1], None if directory else parts[-1])
        return root, parts, directory

    def _find(self, parts: Parts) -> tuple[Root, Parts]:
        for prefix, root in self._prefixes:
            if parts[: len(prefix)] == prefix:
                return root, parts[len(prefix) :]
        raise forbidden()

    def _add(self, given: str, lock_files: bool) -> None:
        root = _open_root(given, self._umask)
        if any(root.path == other.path for other in self._roots):
            os.close(root.fd)
            return
        self._roots.append(root)
        try:
            probe_publishing(root.fd)
            if lock_files:
                probe_flock(root.fd)
        except (ConfigError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"--save-root {given}: {reason}") from error


def _open_root(given: str, umask: int | None) -> Root:
    try:
        _make_root(Path(given), umask)
        path = os.path.realpath(given, strict=True)
        prefixes = {parse(path).parts, *_alias(given, path)}
        return Root(path, os.open(path, OPEN_DIRECTORY), tuple(prefixes))
    except OSError as error:
        raise ConfigError(f"--save-root {given}: {error.strerror}") from error
    except BadPath as error:
        raise ConfigError(f"--save-root {given!r}: {error.message}") from error


def _make_root(path: Path, umask: int | None) -> None:
    if path.is_dir():
        return
    path.mkdir(parents=True, exist_ok=True)
    if umask is not None:
        path.chmod(0o777 & ~umask)


def _alias(given: str, resolved: str) -> set[Parts]:
    """The operator's own spelling, where a symbolic link makes it differ from the resolved one."""
    absolute = os.path.abspath(given)  # noqa: PTH100 - Path.absolute() would leave '..' segments in.
    same = os.path.realpath(absolute) == resolved
    return {parse(absolute).parts} if same else set()


def _join(root: Root, parts: Sequence[str]) -> str:
    path = "/".join((root.path.rstrip("/"), *parts))
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise bad_path(f"must not be longer than {MAX_PATH_BYTES} bytes, with the save root and the file's name")
    return path
