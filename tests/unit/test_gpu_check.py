"""`python -m benchmarks.gpu_check`: runs where little is installed, and doesn't take wrong attention for right."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu.model import LLAMA_8B, TINY, random_model
from benchmarks.gpu.parity import Parity, check, compare
from benchmarks.gpu.rates import Rates, measure, tiny_sizes
from benchmarks.gpu.report import Card, Report
from engine import build
from engine.attention.facade import GroupStep, StepRows
from engine.attention.sdpa import SdpaBackend, SdpaContext
from engine.attention.select import Selection
from engine.attention.varlen import VarlenBackend
from engine.models.base import AttentionOptions
from engine.models.blocks.linear import DenseLinear
from tests.unit.decode_bench import FakeRecorder, make_backend
from tests.unit.paged_kernels import FakeVarlen

CPU = torch.device("cpu")
NOT_NEEDED = ("transformers", "fastapi", "gguf", "httpx", "jinja2", "huggingface_hub", "prometheus_client", "service", "matplotlib")
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
from benchmarks.gpu_check import main
sys.exit(main(sys.argv[1:]))
"""


def test_every_part_runs_on_a_processor_where_little_is_installed(tmp_path: Path) -> None:
    code = WITHOUT.format(missing=NOT_NEEDED)
    arguments = ["--tiny", "--json", str(tmp_path / "report.json"), "--files", str(tmp_path)]
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"]
    assert [(parity["backend"], parity["batches"]) for parity in report["parities"]] == [("sdpa", 40)]
    assert set(report["not_run"]) == {"varlen", "flashinfer"}
    rates = report["rates"]
    assert all(rates["prefill"][0][way] > 0 for way in ("plain", "with_files", "with_copies"))
    assert [rate["batch"] for rate in rates["decode"]] == [1, 3]
    assert all(rate["eager"] > 0 and rate["eager_with_files"] > 0 for rate in rates["decode"])
    assert "sdpa: equal, 40 batches" in done.stdout
    assert "Graphs: attention sdpa on cpu has none" in done.stdout
    assert list(tmp_path.iterdir()) == [tmp_path / "report.json"], "files were left"


class _Spoilt(SdpaContext):
    """Attention with a fault in one row, in one way."""

    fault: str

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        out = super().attend(layer, query, key, value, options)
        out[-1] = {"left out": torch.nan, "wrong": out[-1] * 1.01}[self.fault]
        return out


class _SpoiltBackend(SdpaBackend):
    def __init__(self, fault: str) -> None:
        super().__init__(CPU)
        self.fault = fault

    def plan(self, rows: StepRows, groups: Sequence[GroupStep]) -> _Spoilt:
        context = _Spoilt(self, rows, groups)
        context.fault = self.fault
        return context


class _BlindBackend(SdpaBackend):
    """Takes every sequence to reach one block further than it does."""

    def plan(self, rows: StepRows, groups: Sequence[GroupStep]) -> SdpaContext:
        raise RuntimeError("no such kernel")


@pytest.mark.parametrize("fault", ["left out", "wrong"])
def test_attention_with_a_fault_in_a_single_row_is_not_taken_for_right(fault: str) -> None:
    parity = check(_SpoiltBackend(fault), TINY, CPU, longest=30, num_batches=3)
    assert not parity.ok
    assert len(parity.faults) == 3
    assert check(SdpaBackend(CPU), TINY, CPU, longest=30, num_batches=3).ok


def test_a_backend_that_raises_is_a_fault_and_not_the_end_of_the_check() -> None:
    parity = check(_BlindBackend(CPU), TINY, CPU, longest=30)
    assert parity.faults == ["batch 0: RuntimeError: no such kernel"]


def test_backends_for_pages_pass_with_kernels_that_write_into_nan() -> None:
    assert check(VarlenBackend(CPU, FakeVarlen()), TINY, CPU, longest=300, num_batches=8).ok


def with_graphs(monkeypatch: pytest.MonkeyPatch, recorder: FakeRecorder) -> Rates:
    """The tiny check with doubles of a GPU's attention and graphs."""

    monkeypatch.setattr(build, "select_backend", lambda *arguments: Selection(make_backend("varlen"), 256, "a double"))
    monkeypatch.setattr(build, "recorder_for", lambda device: recorder)
    with tempfile.TemporaryDirectory() as folder:
        return measure(random_model(TINY, CPU), TINY, tiny_sizes(), Path(folder), print)


def test_rows_of_replayed_steps_are_compared_with_those_of_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FakeRecorder()
    rates = with_graphs(monkeypatch, recorder)
    assert recorder.recorded > 3
    parity = rates.graph_parity
    assert parity is not None
    assert (parity.ok, parity.batches) == (True, 3)
    assert all(rate.graphs and rate.graphs_with_files for rate in rates.decode)
    report = Report(Card.of(CPU, Path("x")), "m", [Parity("a", 1)], {}, rates)
    assert report.ok
    assert any(line.startswith("graphs: equal, 3 batches") for line in report.lines())
    assert any(line.startswith("Graphs: 18 recorded in ") for line in report.lines())


def test_graphs_that_can_not_be_recorded_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = with_graphs(monkeypatch, FakeRecorder(error=RuntimeError("not here")))
    report = Report(Card.of(CPU, Path("x")), "m", [Parity("a", 1)], {}, rates)
    assert not report.ok
    assert "Graphs: recording failed: RuntimeError: not here" in report.lines()


def test_rows_that_differ_fail_the_comparison_until_another_token_was_chosen() -> None:
    states = torch.ones(4, 2, 8)
    for other_tokens, changed, ok in (([1, 2, 3, 4], 3, False), ([1, 2, 9, 4], 3, True), ([1, 2, 9, 4], 1, False)):
        other = states.clone()
        other[changed] *= 1.1
        assert compare("graphs", torch.bfloat16, [[([1, 2, 3, 4], states)]], [[(other_tokens, other)]]).ok == ok


def test_no_backend_at_all_is_no_success() -> None:
    card = Card.of(CPU, Path("x"))
    assert not Report(card, "m", [], {"sdpa": "no"}, None).ok
    assert not Report(card, "m", [Parity("a")], {}, None).ok, "no batch was run"
    assert Report(card, "m", [Parity("a", 1)], {}, None).ok


def test_without_a_gpu_only_the_tiny_check_runs(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main([]) == 2
    assert "--tiny" in capsys.readouterr().err


def test_wrong_attention_ends_the_check_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "check", lambda *arguments, **options: Parity("sdpa", 40, 0.5, 0.02, ["batch 3: a row differs by 0.5"]))
    assert gpu_check.main(["--tiny", "--files", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "NOT EQUAL" in printed
    assert "tokens/s" not in printed


def test_operations_of_a_prompt_are_two_per_weight_and_those_of_causal_attention() -> None:
    layers = random_model(TINY, CPU)._weights.layers
    products = [product for layer in layers for product in (layer.mixer.qkv, layer.mixer.output, layer.mlp.gate_up, layer.mlp.down)]
    weights = sum(product.weight.numel() for product in products if isinstance(product, DenseLinear))
    assert TINY.layer_parameters == weights
    attention = sum(2 * 2 * TINY.heads * TINY.head_dim * (position + 1) for position in range(5)) * TINY.layers
    assert TINY.prefill_flops(5) == 2 * weights * 5 + attention
    assert LLAMA_8B.layer_parameters == pytest.approx(6.98e9, rel=0.001)
