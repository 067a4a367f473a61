"""The parts that the benchmark measures with: when a file can be read, what a machine could do, steps from inside, the writer alone."""

import fcntl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import machine
from benchmarks.cases.writing import CHUNK_BLOCKS, LAYERS, PAGE_ROWS, write_files
from benchmarks.edge_model import write_small_model
from benchmarks.files import wait_until_readable
from benchmarks.limits import ModelShape, Product, ProductClock, model_shape
from benchmarks.machine import Machine
from benchmarks.metrics import step_sizes
from benchmarks.plots import draw
from benchmarks.stepping import SteppedEngine
from benchmarks.sweeps import Plot, other_writers, prose
from benchmarks.workload import random_prompt
from engine.config import EngineConfig

SHAPE = ModelShape((Product("a", 4, 8, layers=3), Product("b", 8, 4, layers=3)), Product("head", 100, 8, layers=1))


def test_a_file_can_be_read_once_its_lock_is_free(tmp_path: Path) -> None:
    path, lock = tmp_path / "x.safetensors", tmp_path / "x.safetensors.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(target=wait_until_readable, args=(path, 60.0))
        waiting.start()
        save_file({"hidden_states": torch.ones(2, 2)}, path)
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(60.0)
    assert not waiting.is_alive()


def test_a_file_that_stays_short_is_not_waited_for_without_end(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"hidden_states": torch.ones(2, 2)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TimeoutError, match="not complete"):
        wait_until_readable(path, 0.05)


def test_the_limit_counts_every_parameter_but_embeddings_and_head_twice() -> None:
    assert SHAPE.flops_per_token == 2 * 3 * (4 * 8 + 8 * 4)
    assert SHAPE.weight_bytes(torch.float32) == 4 * (3 * (4 * 8 + 8 * 4) + 100 * 8)


def test_the_limit_takes_each_product_at_the_number_of_rows_that_costs_least() -> None:
    clock = ProductClock(torch.float32, {("a", 10): 1.0, ("a", 100): 5.0, ("b", 10): 2.0})
    assert clock.prefill_limit(SHAPE) == pytest.approx(1 / (3 * 0.05 + 3 * 0.2))


def test_a_decoding_step_is_bounded_by_memory_or_by_its_products() -> None:
    clock = ProductClock(torch.float32, {("a", 16): 0.1, ("b", 16): 0.2, ("head", 16): 0.3})
    computing = 3 * 0.1 + 3 * 0.2 + 0.3
    assert clock.decode_step_limit(SHAPE, 16, memory_bytes_per_second=1e12) == pytest.approx(computing)
    assert clock.decode_step_limit(SHAPE, 16, memory_bytes_per_second=1.0) == SHAPE.weight_bytes(torch.float32)


def test_a_product_measured_again_keeps_its_best_time() -> None:
    clock = ProductClock(torch.float32, {("a", 2): 0.0})
    clock.measure(SHAPE.layers, [2])
    assert clock.best["a", 2] == 0.0
    assert clock.best["b", 2] > 0.0


def test_shapes_are_those_of_the_fused_products(tmp_path: Path) -> None:
    write_small_model(tmp_path / "model", 512, tmp_path, width=128, layers=2)
    shape = model_shape(tmp_path / "model")
    assert [(each.outputs, each.inputs) for each in shape.layers] == [(384, 128), (128, 128), (768, 128), (128, 384)]
    assert {each.layers for each in shape.layers} == {2}
    assert (shape.head.outputs, shape.head.inputs) == (512, 128)


def test_sizes_of_steps_are_read_off_the_buckets_that_have_grown() -> None:
    name = "strata_batch_tokens_bucket"
    before = {(name, "1.0"): 1.0, (name, "2.0"): 1.0, (name, "4.0"): 2.0, (name, "+Inf"): 2.0}
    after = {(name, "1.0"): 1.0, (name, "2.0"): 3.0, (name, "4.0"): 4.0, (name, "+Inf"): 4.0}
    assert step_sizes(before, after) == [2]


def test_memory_of_a_process_has_that_of_its_children_in_it() -> None:
    grown = "import sys, time; held = bytearray(64 << 20); print('grown', flush=True); sys.stdin.read()"
    shell = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grown!r}])"]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        peak = machine.peak_rss_bytes(process.pid)
        process.communicate()
    assert peak is not None
    assert peak > 64 << 20


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    write_small_model(tmp_path / "model", 512, tmp_path, width=64, layers=2)
    return tmp_path / "model"


def test_only_steps_in_which_every_request_got_a_token_are_counted(small_model: Path, tmp_path: Path) -> None:
    config = EngineConfig(str(small_model), device="cpu", dtype="float32", max_model_len=128, kv_cache_tokens=1024, threads=1)
    engine = SteppedEngine(config)
    saved = tmp_path / "saved"
    saved.mkdir()
    found = engine.decode([random_prompt(8, 512, seed) for seed in range(4)], 6, (saved, (1, 2)))
    engine.close()
    assert len(found.steps) == 4  # of six, less the first and the last
    assert all(0 < step.model_seconds < step.seconds for step in found.steps)
    shapes = {tuple(load_file(path)["hidden_states"].shape) for path in saved.iterdir()}
    assert shapes == {(13, 2, 64)}


def test_the_writer_alone_makes_whole_files(tmp_path: Path) -> None:
    pages = torch.randn(1 + CHUNK_BLOCKS * len(LAYERS), PAGE_ROWS, 576)
    paths = [tmp_path / f"{index}.safetensors" for index in range(2)]
    rows = 2 * CHUNK_BLOCKS * PAGE_ROWS
    assert write_files(pages, paths, rows) > 0
    assert {tuple(load_file(path)["hidden_states"].shape) for path in paths} == {(rows, len(LAYERS), 576)}


def test_other_writers_write_while_they_are_wanted_and_leave_nothing(tmp_path: Path) -> None:
    with other_writers(tmp_path, 2):
        until = time.monotonic() + 60
        while sum(path.stat().st_size > 0 for path in tmp_path.iterdir()) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert sum(path.stat().st_size > 0 for path in tmp_path.iterdir()) == 2
    assert list(tmp_path.iterdir()) == []


def test_prose_is_cut_to_one_length_and_differs_from_prompt_to_prompt() -> None:
    prompts = prose(3, 100)
    assert {len(prompt) for prompt in prompts} == {100}
    assert len({tuple(prompt) for prompt in prompts}) == 3


def test_a_plot_becomes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    facts = Machine("cpu", 2, 2, 1 << 30, {"torch": "2"}, 100.0, 1e8, 1e10, 0.5)
    path = draw(Plot("length", "tokens", "ms", {"saving": [(64, 1.0), (128, 2.0)]}), facts, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
