"""A disk that hangs while clients push many times more than the pages hold: they wait, memory stays bounded, and requests without files
don't notice.

`STRATA_TEST_SLOW_DISK=500` (MiB of states) is the full run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.faults.children import Child, check_file, check_nothing_is_left, check_records, flags, number_from_environment
from tests.faults.disk import FOR_EVER, HANGING_SECONDS, FaultyDisk, faulty_disk
from tests.http.conftest import BOS, EOS, MAX_MODEL_LEN, VOCAB_SIZE, make_tokenizer

MIB = 1 << 20
PUSHED_BYTES = number_from_environment("STRATA_TEST_SLOW_DISK", 64) * MIB
BATCH_TOKENS = 64
BUDGET_BYTES = 4 * MIB
"""Of the pages: a small part of what is pushed, so that memory that grows with it can't be taken for anything else."""
NUM_PLAIN = 20
PLAIN = {"prompt": "Hello", "max_tokens": 24}
LAYERS = [*range(7), "norm"]
WIDTH = 256
ROWS = 200
PAGE_BYTES = 16 * WIDTH * 4
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

    def push(self, clients: ThreadPoolExecutor, num_bytes: int) -> list[Future[httpx.Response]]:
        """Sends enough requests for so many bytes of states."""
        first, self.num_saves = self.num_saves, self.num_saves + -(-num_bytes // SAVE_BYTES)
        return [clients.submit(self._save, number) for number in range(first, self.num_saves)]

    def _save(self, number: int) -> httpx.Response:
        prompt = "".join(random.Random(number).choices("abcdefgh ", k=ROWS - 1))
        wanted = {"layers": LAYERS, "dtype": "float32"}
        return self.child.complete(prompt=prompt, max_tokens=1, kv_transfer_params=wanted)

    def hang(self) -> None:
        """From now on no write to a save's file ends before the disk is healed."""
        self.disk.fail("pwrite", match=".part", times=FOR_EVER, delay_seconds=HANGING_SECONDS)

    def until_pages_are_taken(self) -> float:
        """Waits until requests wait for pages and nothing goes on any more: the same figures as at the last look. Returns how many pages
        are held.
        """
        seen: dict[str, float] = {}
        while True:
            before, seen = seen, self.child.metrics()
            waiting = seen["strata_requests_waiting"] + seen["strata_requests_running"]
            if waiting and all(
                before.get(name) == seen[name] for name in ("strata_computed_tokens_total", "strata_state_pages[referenced]")
            ):
                return seen["strata_state_pages[referenced]"]

    def plain_costs(self) -> tuple[float, float]:
        """Tokens computed and steps run for some completions without files."""
        before = self.child.metrics()
        for _ in range(NUM_PLAIN):
            response = self.child.complete(**PLAIN)
            assert response.status_code == 200, response.text
        after = self.child.metrics()
        tokens, steps = (after[name] - before[name] for name in ("strata_computed_tokens_total", "strata_batch_tokens_count"))
        return tokens, steps


@pytest.fixture
def slow(wide_model: Path, tmp_path: Path) -> Iterator[SlowDisk]:
    root, state = tmp_path / "saves", tmp_path / "state"
    sizes = ["--state-cache-memory", str(BUDGET_BYTES), "--state-page-size", "16", "--max-batch-tokens", str(BATCH_TOKENS)]
    with faulty_disk(tmp_path, root) as disk, disk.under(flags(wide_model, root, state, *sizes)) as child:
        yield SlowDisk(child, disk, root, state)


def verify(saves: list[Future[httpx.Response]]) -> None:
    for save in saves:
        response = save.result()
        assert response.status_code == 200, response.text
        saved = response.json()["kv_transfer_params"]
        assert saved["shape"] == [ROWS, len(LAYERS), WIDTH]
        check_file(saved["hidden_states_path"])


def test_while_a_disk_hangs_saves_wait_for_pages_and_requests_without_files_for_nothing(slow: SlowDisk) -> None:
    """Each save has a client of its own: their rows would take many times the budget, were they not waited for."""
    with ThreadPoolExecutor(PUSHED_BYTES // SAVE_BYTES + 1) as clients:
        try:
            verify(slow.push(clients, PUSHED_BYTES // 4))  # whatever a load like this takes once and for all
            slow.child.settled()
            before, alone = slow.child.resident_bytes, slow.plain_costs()
            slow.hang()
            saves = slow.push(clients, PUSHED_BYTES)
            held = slow.until_pages_are_taken()
            beside = slow.plain_costs()
            grown = slow.child.resident_bytes - before
            assert not any(save.done() for save in saves)
        finally:
            slow.disk.heal()
        verify(saves)
    print(
        f"{PUSHED_BYTES // MIB} MiB wait for a disk: resident memory grew by {grown / MIB:.1f} MiB at a budget of {BUDGET_BYTES // MIB} MiB"
    )
    assert held >= 0.9 * BUDGET_BYTES / PAGE_BYTES
    assert beside == alone
    assert grown < PUSHED_BYTES / 4
    slow.child.settled()
    assert "ERROR" not in slow.child.service.tail()
    check_nothing_is_left(slow.root)
    check_records(slow.state, slow.root)
