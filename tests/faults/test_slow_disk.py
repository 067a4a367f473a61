"""A disk that takes 1 MiB a second while clients push more than that: memory stays bounded, and requests without files don't notice.

`STRATA_TEST_SLOW_DISK=50` (MiB of states) is the full run.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.faults.children import Child, check_file, check_nothing_is_left, check_records, flags, number_from_environment
from tests.faults.disk import FaultyDisk, faulty_disk
from tests.http.conftest import BOS, EOS, MAX_MODEL_LEN, VOCAB_SIZE, make_tokenizer

MIB = 1 << 20
PUSHED_BYTES = number_from_environment("STRATA_TEST_SLOW_DISK", 10) * MIB
BATCH_TOKENS = 64
BUDGET_BYTES = max(3 * MIB, PUSHED_BYTES // 8)
ROUNDS = 2
NUM_CLIENTS = 6
WARM_UP_ROUNDS, WARM_UP_REQUESTS = 10, 30
STEADY_BYTES = MIB // 4
LAYERS = [*range(7), "norm"]
WIDTH = 256
ROWS = 200
SAVE_BYTES = ROWS * len(LAYERS) * WIDTH * 4
"""Of one request: 1.6 MB, so that few of them fill the pages."""


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with rows of 1 KiB."""
    folder = tmp_path_factory.mktemp("model") / "wide"
    shape = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_MODEL_LEN, bos_token_id=BOS, eos_token_id=EOS, **shape)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@dataclass
class SlowDisk:
    """A service, its disk, and what was seen of both."""

    child: Child
    disk: FaultyDisk
    root: Path
    state: Path
    num_saves: int = 0
    largest: int = 0
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)

    def push(self, clients: ThreadPoolExecutor, num_bytes: int) -> list[Future[httpx.Response]]:
        """Sends enough requests for so many bytes of states."""
        first, self.num_saves = self.num_saves, self.num_saves + -(-num_bytes // SAVE_BYTES)
        return [clients.submit(self._save, number) for number in range(first, self.num_saves)]

    def warm_up(self, clients: ThreadPoolExecutor) -> int:
        """The same load on a fast disk, until it needs no more memory than before; returns how much it needs.

        Before that, steps of every size: a product is compiled for each number of rows, and as many are kept as `COMPILED_SHAPES` says.
        """
        for rows in range(1, BATCH_TOKENS + 1):
            self.child.complete(prompt="".join(random.Random(-rows).choices("ijklmnop", k=rows)), max_tokens=1)
        for _ in range(WARM_UP_ROUNDS):
            before = self.largest
            saves = self.push(clients, 2 * BUDGET_BYTES)
            for _ in range(WARM_UP_REQUESTS):
                self.plain()
            verify(saves)
            if self.largest - before < STEADY_BYTES:
                break
        self.child.settled()
        return self.largest

    def _save(self, number: int) -> httpx.Response:
        prompt = "".join(random.Random(number).choices("abcdefgh ", k=ROWS - 1))
        wanted = {"layers": LAYERS, "dtype": "float32"}
        return self.child.complete(prompt=prompt, max_tokens=1, kv_transfer_params=wanted)

    def plain(self) -> float:
        """Seconds that a completion without a file takes."""
        started = time.monotonic()
        response = self.child.complete(prompt="Hello", max_tokens=24)
        assert response.status_code == 200, response.text
        self.largest = max(self.largest, self.child.resident_bytes)
        return time.monotonic() - started


@pytest.fixture
def slow(wide_model: Path, tmp_path: Path) -> Iterator[SlowDisk]:
    root, state = tmp_path / "saves", tmp_path / "state"
    sizes = ["--state-cache-memory", str(BUDGET_BYTES), "--block-size", "16", "--max-batch-tokens", str(BATCH_TOKENS)]
    with faulty_disk(tmp_path, root) as disk, disk.under(flags(wide_model, root, state, *sizes)) as child:
        yield SlowDisk(child, disk, root, state)


def verify(saves: list[Future[httpx.Response]]) -> None:
    for save in saves:
        response = save.result()
        assert response.status_code == 200, response.text
        saved = response.json()["kv_transfer_params"]
        assert saved["shape"] == [ROWS, len(LAYERS), WIDTH]
        check_file(saved["hidden_states_path"])


def test_a_slow_disk_costs_neither_memory_nor_the_speed_of_requests_without_files(slow: SlowDisk) -> None:
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        baseline = slow.warm_up(clients)
        for _ in range(ROUNDS):
            slow.disk.heal(bytes_per_second=MIB)
            saves = slow.push(clients, PUSHED_BYTES // ROUNDS)
            while not all(save.done() for save in saves):
                slow.beside.append(slow.plain())
            verify(saves)
            slow.child.settled()
            slow.disk.heal()
            slow.alone.extend(slow.plain() for _ in range(len(slow.beside) // 2 - len(slow.alone)))
    grown, speed = slow.largest - baseline, statistics.median(slow.alone) / statistics.median(slow.beside)
    print(f"{PUSHED_BYTES // MIB} MiB at 1 MiB/s: resident memory grew by {grown / MIB:.1f} MiB at a budget of {BUDGET_BYTES // MIB} MiB;")
    print(f"{len(slow.beside)} plain completions beside ran at {speed:.0%} of the speed of {len(slow.alone)} alone")
    assert grown <= 1.1 * BUDGET_BYTES
    assert speed >= 0.8
    assert "ERROR" not in slow.child.service.tail()
    check_nothing_is_left(slow.root)
    check_records(slow.state, slow.root)


def test_pages_are_waited_for_and_not_taken_beyond_the_budget(slow: SlowDisk) -> None:
    """While the disk is slow, requests with files wait for pages; each still gets its turn."""
    slow.disk.heal(bytes_per_second=2 * MIB)
    seen: list[dict[str, float]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(slow.child.metrics())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            verify(slow.push(clients, 3 * BUDGET_BYTES))
    finally:
        stop.set()
        watcher.join()
    pages = {sum(metrics[f"strata_state_pages[{state}]"] for state in ("free", "cached", "referenced")) for metrics in seen}
    assert len(pages) == 1
    most = max(metrics["strata_state_pages[referenced]"] for metrics in seen)
    assert most >= 0.9 * BUDGET_BYTES // (16 * WIDTH * 4)
    assert slow.child.settled()["strata_state_pages[referenced]"] == 0
