"""Which device and dtype a start resolves to, on a machine with and without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.device import resolve as module
from engine.device.resolve import dtype_name, multiplies_bfloat16, resolve_device, resolve_dtype
from engine.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("name", "device"), [("auto", GPU), ("cuda", GPU), ("cuda:1", torch.device("cuda", 1)), ("cpu", CPU)])
def test_a_gpu_is_taken_where_there_is_one(name: str, device: torch.device) -> None:
    assert resolve_device(name) == device


@pytest.mark.usefixtures("no_gpu")
def test_the_processor_is_taken_where_there_is_none() -> None:
    assert resolve_device("auto") == CPU
    with pytest.raises(ConfigError, match="0 CUDA devices were found"):
        resolve_device("cuda")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("name", "message"), [("cuda:2", "2 CUDA devices"), ("gpu", "is not a device"), ("meta", "is not supported")])
def test_devices_that_are_not_there_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_device(name)


@pytest.mark.parametrize(
    ("checkpoint", "device", "native", "dtype"),
    [
        (torch.bfloat16, GPU, False, torch.bfloat16),
        (torch.float16, GPU, False, torch.float16),
        (torch.bfloat16, CPU, True, torch.bfloat16),
        (torch.bfloat16, CPU, False, torch.float32),
        (torch.float16, CPU, True, torch.float32),
        (torch.float32, CPU, True, torch.float32),
    ],
)
def test_auto_is_the_dtype_of_the_checkpoint_unless_the_processor_would_emulate_it(
    checkpoint: torch.dtype, device: torch.device, native: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda: native)
    assert resolve_dtype("auto", checkpoint, device) == dtype


def test_a_dtype_that_is_asked_for_is_taken() -> None:
    assert resolve_dtype("float16", torch.bfloat16, CPU) == torch.float16
    with pytest.raises(ConfigError, match=r"'float64' is not supported: float32, bfloat16, float16"):
        resolve_dtype("float64", torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("text", "native"),
    [
        ("model name : x\nflags\t\t: fpu avx512_bf16 sse\n", True),
        ("flags : fpu amx_bf16\n", True),
        ("Features : fp asimd bf16\n", True),
        ("flags : fpu avx512f avx512_bf16x\n", False),
        ("model name : bf16\n", False),
        ("", False),
    ],
)
def test_the_flags_of_the_processor_say_whether_it_multiplies_bfloat16(text: str, native: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert multiplies_bfloat16(tmp_path / "cpuinfo") is native


def test_without_that_file_it_does_not(tmp_path: Path) -> None:
    assert not multiplies_bfloat16(tmp_path / "missing")


def test_dtypes_are_named_as_in_files() -> None:
    assert [dtype_name(d) for d in (torch.float32, torch.bfloat16, torch.float16)] == ["float32", "bfloat16", "float16"]
