"""Which attention backend runs, for devices that needn't be there."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from engine.attention import flashinfer, varlen
from engine.attention.facade import AttentionNeeds
from engine.attention.flashinfer import FlashInferBackend
from engine.attention.sdpa import SdpaBackend
from engine.attention.select import CANDIDATES, Candidate, needs_of, select_backend
from engine.attention.varlen import VarlenBackend
from engine.cache.spec import LayerKV
from engine.config import AttentionName
from engine.errors import ConfigError

ON_CPU = AttentionNeeds(torch.device("cpu"), None, torch.bfloat16, frozenset({64}), None)
ON_GPU = AttentionNeeds(torch.device("cuda"), (9, 0), torch.bfloat16, frozenset({64}), None)


@pytest.fixture(autouse=True)
def _everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "has_flash_attention", lambda: True)
    monkeypatch.setattr(flashinfer, "is_installed", lambda: True)


def candidates() -> list[Candidate]:
    """Those there are, without the library and the device that flashinfer needs when it is made."""
    cpu = torch.device("cpu")
    return [replace(c, make=lambda _: FlashInferBackend(cpu, object(), 1)) if c.name == "flashinfer" else c for c in CANDIDATES]


def chosen(name: str, needs: AttentionNeeds) -> tuple[str, int]:
    selection = select_backend(name, needs, candidates())
    return selection.backend.name, selection.block_size


def test_a_cpu_gets_the_reference_backend() -> None:
    assert chosen("auto", ON_CPU) == ("sdpa", 32)


def test_a_gpu_gets_torchs_kernel() -> None:
    assert chosen("auto", ON_GPU) == ("varlen", 256)
    assert select_backend("auto", ON_GPU, candidates()).reason == "the first choice"


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (replace(ON_GPU, block_size=512), ("varlen", 512)),
        (replace(ON_GPU, block_size=16), ("flashinfer", 16)),
        (replace(ON_GPU, head_dims=frozenset({64, 80})), ("varlen", 256)),
        (replace(ON_GPU, head_dims=frozenset({512})), ("sdpa", 32)),
        (replace(ON_GPU, head_dims=frozenset({64, 100})), ("sdpa", 32)),
        (replace(ON_GPU, soft_caps=True), ("flashinfer", 32)),
        (replace(ON_GPU, sinks=True), ("sdpa", 32)),
        (replace(ON_GPU, values_in_keys=True), ("sdpa", 32)),
        (replace(ON_GPU, capability=(7, 5)), ("sdpa", 32)),
        (replace(ON_GPU, dtype=torch.float32), ("sdpa", 32)),
        (replace(ON_GPU, dtype=torch.float16), ("varlen", 256)),
    ],
)
def test_auto_takes_the_first_that_can_run(needs: AttentionNeeds, expected: tuple[str, int]) -> None:
    assert chosen("auto", needs) == expected


def test_auto_goes_on_without_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "has_flash_attention", lambda: False)
    assert chosen("auto", ON_GPU) == ("flashinfer", 32)
    monkeypatch.setattr(flashinfer, "is_installed", lambda: False)
    assert chosen("auto", ON_GPU) == ("sdpa", 32)
    assert select_backend("auto", ON_GPU, candidates()).reason == (
        "attention varlen can't run: this torch was built without flash attention; "
        "attention flashinfer can't run: flashinfer is not installed (extra [flashinfer])"
    )


def test_auto_goes_on_without_a_library_that_breaks_when_it_is_imported() -> None:
    def broken(device: torch.device) -> FlashInferBackend:
        raise ConfigError("attention flashinfer can't run: importing it failed: no compiler")

    needs = replace(ON_GPU, block_size=16)
    selection = select_backend("auto", needs, [replace(c, make=broken) if c.name == "flashinfer" else c for c in CANDIDATES])
    assert selection.backend.name == "sdpa"
    assert "no compiler" in selection.reason


@pytest.mark.parametrize("name", ["sdpa", "varlen", "flashinfer"])
def test_a_backend_can_be_asked_for_by_name(name: str) -> None:
    assert chosen(name, ON_GPU)[0] == name
    assert select_backend(name, ON_GPU, candidates()).reason == "asked for"


@pytest.mark.parametrize(
    ("name", "needs", "message"),
    [
        ("varlen", ON_CPU, "attention varlen can't run: it needs a CUDA device"),
        ("flashinfer", ON_CPU, "attention flashinfer can't run: it needs a CUDA device"),
        ("varlen", replace(ON_GPU, capability=(7, 5)), "it needs compute capability 8.0, this device has 7.5"),
        ("flashinfer", replace(ON_GPU, capability=(7, 5)), "it needs compute capability 8.0, this device has 7.5"),
        ("varlen", replace(ON_GPU, dtype=torch.float32), "it computes in bfloat16 and float16, not in float32"),
        ("flashinfer", replace(ON_GPU, dtype=torch.float32), "it computes in bfloat16 and float16, not in float32"),
        ("varlen", replace(ON_GPU, head_dims=frozenset({264})), "heads that are a multiple of 8 and at most 256 wide, not 264"),
        ("flashinfer", replace(ON_GPU, head_dims=frozenset({80})), "heads 64, 128, 256 wide, not 80"),
        ("varlen", replace(ON_GPU, soft_caps=True), "it has neither soft caps nor attention sinks, and this model has some"),
        ("flashinfer", replace(ON_GPU, sinks=True), "its attention sinks aren't built in here"),
        ("varlen", replace(ON_GPU, block_size=16), "block_size is 16, but the attention backend varlen needs a multiple of 256"),
        ("flash", ON_GPU, "attention is 'flash', but must be one of auto, flashinfer, sdpa, varlen"),
        ("auto", replace(ON_CPU, block_size=0), "block_size is 0, but must be at least 1"),
    ],
)
def test_what_can_not_run_is_refused_with_the_reason(name: str, needs: AttentionNeeds, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select_backend(name, needs, candidates())
    assert message in str(caught.value)


def test_a_torch_without_the_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "find_kernel", lambda: None)
    with pytest.raises(ConfigError, match=r"torch .* has no varlen_attn with block tables"):
        select_backend("varlen", ON_GPU)


def test_needs_come_from_the_layers() -> None:
    layers = [LayerKV(2, 64), LayerKV(2, 64, window=9), LayerKV(1, 128)]
    needs = needs_of(layers, torch.device("cpu"), torch.float32, 22)
    assert needs == AttentionNeeds(torch.device("cpu"), None, torch.float32, frozenset({64, 128}), 22)


def test_names_are_those_of_the_backends() -> None:
    assert [c.name for c in CANDIDATES] == [VarlenBackend.name, FlashInferBackend.name, SdpaBackend.name]
    assert {*get_args(AttentionName)} == {"auto", *(c.name for c in CANDIDATES)}
