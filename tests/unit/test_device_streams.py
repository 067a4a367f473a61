"""Copies beside the device's other work: in which order a device is told what."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from engine.device.streams import DeviceStream, HostStream, copy_stream

CPU = torch.device("cpu")


class FakeStream:
    """Of torch: notes what it is told. Work is done at once while a stream is current."""

    log: list[str]
    current: list[FakeStream]

    def __init__(self, device: object = None) -> None: ...

    def wait_stream(self, other: object) -> None:
        self.log.append("copies wait for the model" if other is not self else "nonsense")

    def __enter__(self) -> FakeStream:
        self.current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.current.pop()


class FakeEvent:
    done = False
    log: list[str]

    def __init__(self, device: object = None) -> None: ...

    def record(self, stream: object) -> None:
        self.log.append("event on the copies' stream" if isinstance(stream, FakeStream) else "event elsewhere")

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.log.append("host waits")
        FakeEvent.done = True


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the device was told."""
    told: list[str] = []
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: object())
    monkeypatch.setattr(FakeStream, "log", told, raising=False)
    monkeypatch.setattr(FakeStream, "current", [], raising=False)
    monkeypatch.setattr(FakeEvent, "log", told, raising=False)
    monkeypatch.setattr(FakeEvent, "done", False)
    return told


class Source:
    """A tensor that can be seen to go."""

    def __init__(self, log: list[str]) -> None:
        self.log = log


class Target:
    def copy_(self, source: Source, *, non_blocking: bool) -> None:
        assert non_blocking, "the host would wait for the copy"
        assert FakeStream.current, "the copy would stand in the way of the model"
        source.log.append("copy")


def test_a_copy_follows_what_the_model_was_told_and_the_host_goes_on(log: list[str]) -> None:
    event = DeviceStream(CPU).copy(Target(), Source(log))  # type: ignore[arg-type]  # doubles
    assert log == ["copies wait for the model", "copy", "event on the copies' stream"]
    assert not event.done()
    event.wait()
    assert event.done()
    assert log[3:] == ["host waits"]


def test_the_source_of_a_copy_lives_until_it_is_known_to_have_ended(log: list[str]) -> None:
    source = Source(log)
    alive = weakref.ref(source)
    event = DeviceStream(CPU).copy(Target(), source)  # type: ignore[arg-type]  # doubles
    del source
    gc.collect()
    assert not event.done()
    assert alive() is not None
    FakeEvent.done = True
    assert event.done()
    gc.collect()
    assert alive() is None


def test_in_host_memory_a_copy_has_ended_when_it_was_asked_for() -> None:
    target = torch.zeros(3)
    event = HostStream().copy(target, torch.ones(3))
    assert event.done()
    event.wait()
    assert target.tolist() == [1, 1, 1]
    assert isinstance(copy_stream(CPU), HostStream)
