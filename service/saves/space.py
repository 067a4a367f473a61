"""Room for files: what is kept free on every disk, what all files together may take, and what running saves may still need.

A save reserves the most that its file can take before any work is done for it, so a request that might not fit is refused with 507
instead of failing when it has been computed. A reservation ends with its save.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from service.config.units import format_size
from service.errors import DiskFull, from_os_error
from service.registry.registry import Registry
from service.saves.paths.roots import SaveRoots

log = logging.getLogger(__name__)

LARGEST_DEFAULT_RESERVE = 2**30
DEFAULT_RESERVE_PART = 20
"""One part in so many of a file system is kept free, unless set: 5 %."""
LOW_SPACE_FACTOR = 1.25
"""Free space below this many times the reserve is logged as a warning."""
LOG_INTERVAL_SECONDS = 60.0
"""Between two lines about the same disk."""


class QuotaExceeded(DiskFull):
    """All files together would take more than `--max-saved-bytes`."""

    default_code = "quota_exceeded"


@dataclass(frozen=True)
class Disk:
    """A file system that holds saves. Sizes in bytes."""

    device: int
    free: int
    reserve: int
    """Kept free; 0: not looked at."""


@dataclass(frozen=True)
class Need:
    """What a save may take at most, and the directory that its file will be in."""

    save_id: str
    directory_fd: int
    bytes: int


Runner = Callable[..., Awaitable[Any]]
"""Calls a function with arguments on a thread."""


@dataclass(frozen=True)
class _Reservation:
    device: int
    bytes: int


async def _no_recount() -> None:
    pass


class Space:
    """Used on the event loop, but for `refresh`."""

    def __init__(
        self, registry: Registry, roots: SaveRoots, *, max_saved_bytes: int | None = None, min_free_bytes: int | None = None
    ) -> None:
        """`min_free_bytes`: on every disk; 0 doesn't look at free space, None is the smaller of 1 GiB and 5 % of each file system."""
        self.max_saved_bytes = max_saved_bytes
        self.recount: Callable[[], Awaitable[None]] = _no_recount
        """Looks for files that clients have removed; called before a request is refused for the quota."""
        self.disks: dict[str, Disk] = {}
        """By save root, as of the last look."""
        self._registry = registry
        self._roots = roots
        self._min_free_bytes = min_free_bytes
        self._reservations: dict[str, _Reservation] = {}
        self._reserved: Counter[int] = Counter()
        """Bytes by device."""
        self._released: Counter[int] = Counter()
        """Bytes of reservations that have ended, by device: figures that were read before that may lack them. Only grows."""
        self._next_log_at: dict[str, float] = {}
        self._saved_bytes = 0

    @property
    def saved_bytes(self) -> int:
        """Bytes of the files of completed saves, as of the last look."""
        return self._saved_bytes

    @property
    def reserved_bytes(self) -> int:
        """What running saves may take at most."""
        return sum(self._reserved.values())

    async def reserve(self, needs: Sequence[Need], written: Callable[[str], int], run: Runner) -> None:
        """Reserves room for the saves of one request, for all or none.

        `written(save_id)` tells what a running save has written; `run` calls what looks at their disk.

        Raises `DiskFull` where they might not fit above the reserve of their disk, and `QuotaExceeded`.
        """
        try:
            await self._reserve(needs, written, run)
        except QuotaExceeded:
            await self.recount()
            await self._reserve(needs, written, run)

    async def _reserve(self, needs: Sequence[Need], written: Callable[[str], int], run: Runner) -> None:
        released = self._released.copy()
        disks: list[Disk] = await run(self._disks_of, needs)
        used = 0 if self.max_saved_bytes is None else await asyncio.wrap_future(self._registry.used_bytes())
        # No `await` below: nothing else runs. Reservations released meanwhile may be missing in the figures that were read.
        since = self._released - released
        self._check_quota(used + since.total(), sum(need.bytes for need in needs))
        for disk in set(disks):
            self._check_disk(disk, sum(need.bytes for need, other in zip(needs, disks, strict=True) if other == disk), since, written)
        for need, disk in zip(needs, disks, strict=True):
            self._reservations[need.save_id] = _Reservation(disk.device, need.bytes)
            self._reserved[disk.device] += need.bytes

    def release(self, save_id: str) -> None:
        """The save has ended: what it has left is on the disk and in the registry. Idempotent."""
        reservation = self._reservations.pop(save_id, None)
        if reservation is not None:
            self._reserved[reservation.device] -= reservation.bytes
            self._released[reservation.device] += reservation.bytes

    def refresh(self) -> None:
        """Reads how much is saved, and for `disks` how much is free below every root, and says so where that comes near the reserve.

        Waits for the registry and for the disks.
        """
        self._saved_bytes = self._registry.used_bytes().result()
        for root in self._roots.roots:
            try:
                disk = self._disk(root.fd)
            except OSError as error:
                self._log_rate_limited(root.path, f"the free space of {root.path} can't be read: {error.strerror}")
                continue
            self.disks[root.path] = disk
            left = disk.free - self._reserved[disk.device]
            if left < LOW_SPACE_FACTOR * disk.reserve:
                free, reserve = format_size(max(0, left)), format_size(disk.reserve)
                self._log_rate_limited(
                    root.path, f"the disk of {root.path} is nearly full: {free} are free, saves that need the last {reserve} are refused"
                )

    def _disks_of(self, needs: Sequence[Need]) -> list[Disk]:
        """Of one moment: needs on the same device have equal disks."""
        known: dict[int, Disk] = {}
        try:
            devices = [os.fstat(need.directory_fd).st_dev for need in needs]
            for need, device in zip(needs, devices, strict=True):
                if device not in known:
                    known[device] = self._disk(need.directory_fd)
        except OSError as error:
            raise from_os_error(error) from error
        return [known[device] for device in devices]

    def _disk(self, fd: int) -> Disk:
        figures = os.fstatvfs(fd)
        size, free = figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize
        default = min(LARGEST_DEFAULT_RESERVE, size // DEFAULT_RESERVE_PART)
        return Disk(os.fstat(fd).st_dev, free, default if self._min_free_bytes is None else self._min_free_bytes)

    def _check_quota(self, used: int, needed: int) -> None:
        if self.max_saved_bytes is None or used + self.reserved_bytes + needed <= self.max_saved_bytes:
            return
        taken = f"{used} bytes are saved and {self.reserved_bytes} reserved for running saves"
        self._log_rate_limited("quota", f"a request was refused: {taken} of {self.max_saved_bytes}")
        raise QuotaExceeded(f"the request may need {needed} bytes; {taken} of the {self.max_saved_bytes} that may be saved")

    def _check_disk(self, disk: Disk, needed: int, since: Counter[int], written: Callable[[str], int]) -> None:
        if disk.reserve == 0:
            return
        free = disk.free - since[disk.device]
        left = free - self._reserved[disk.device]
        if left - needed >= disk.reserve:
            return
        # Once more and exactly: what running saves have written already has left the free space.
        left = free - self._outstanding(disk.device, written)
        if left - needed >= disk.reserve:
            return
        self._log_rate_limited(
            f"device {disk.device}", f"a request was refused: it may need {format_size(needed)}, {format_size(max(0, left))} are free"
        )
        raise DiskFull(f"the request may need {needed} bytes; the disk has {max(0, left)} left, of which {disk.reserve} are kept free")

    def _outstanding(self, device: int, written: Callable[[str], int]) -> int:
        here = [(save_id, reservation.bytes) for save_id, reservation in self._reservations.items() if reservation.device == device]
        return sum(max(0, size - written(save_id)) for save_id, size in here)

    def _log_rate_limited(self, subject: str, line: str) -> None:
        """Logs a warning, at most one per subject and `LOG_INTERVAL_SECONDS`."""
        now = time.monotonic()
        if now >= self._next_log_at.get(subject, now):
            self._next_log_at[subject] = now + LOG_INTERVAL_SECONDS
            log.warning("%s", line)
