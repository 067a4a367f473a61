"""Asynchronous copies from a device to host memory, and events that tell when they are done."""

from collections.abc import Callable
from typing import Protocol

import torch


class CopyEvent(Protocol):
    """The end of an asynchronous copy."""

    def done(self) -> bool:
        """Whether the copy has completed. Doesn't wait."""

    def wait(self) -> None:
        """Blocks the host until the copy has completed."""


class CopyStream(Protocol):
    """Copies run in the order in which they were asked for, beside the device's other work."""

    pinned: bool
    """Whether host memory must be pinned, so that a copy into it needs no one's attention."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        """Fills `target`, on the host, from `source` as it is after all that the device's current stream was given so far.

        Until the copy is done `target` holds nothing of use, and `source` must not be written, nor its memory used again.
        """


StreamFactory = Callable[[torch.device], CopyStream]


class HostStream:
    """For a model in host memory, where there is nothing to wait for."""

    pinned = False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        target.copy_(source)
        return _CompletedCopy()


class DeviceStream:
    """A stream of its own on an accelerator."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            target.copy_(source, non_blocking=True)
        event = torch.Event(self._device)
        event.record(self._stream)
        return _PendingCopy(event, source)


def copy_stream(device: torch.device) -> CopyStream:
    """What copies from this device need."""
    return HostStream() if device.type == "cpu" else DeviceStream(device)


class HostCopies:
    """Tensors of one step on their way to the host, each in memory of its own. Waiting for them waits for the step."""

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self._events: list[CopyEvent] = []
        """All are kept, since each keeps its source."""

    def start(self, source: torch.Tensor) -> torch.Tensor:
        """A tensor that holds what `source` does once `wait` has returned."""
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._stream.pinned)
        self._events.append(self._stream.copy(target, source))
        return target

    def end(self, device: torch.device) -> None:
        """The step is complete. Where nothing of it goes to the host, there must be something to wait for all the same."""
        if not self._events:
            self.start(torch.zeros(1, device=device))

    def wait(self) -> None:
        for event in self._events:
            event.wait()


class SingleStreamCheck:
    """What is given to the device must all go to the same stream, which runs it in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None

    def check(self) -> None:
        """Asserts that the current stream is the first one. There are none on a CPU."""
        if self._device.type != "cpu":
            current = torch.accelerator.current_stream(self._device)
            self._stream = self._stream or current
            assert current == self._stream, "steps are given to more than one stream"


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device that the host doesn't wait for: out of pinned memory, since from any other it would."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class _CompletedCopy:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """It has completed."""


class _PendingCopy:
    """Keeps the source alive: the allocator would give its memory to the next tensor of the stream that made it."""

    def __init__(self, event: torch.Event, source: torch.Tensor) -> None:
        self._event = event
        self._source: torch.Tensor | None = source

    def done(self) -> bool:
        if self._event.query():
            self._source = None
        return self._source is None

    def wait(self) -> None:
        self._event.synchronize()
        self._source = None
