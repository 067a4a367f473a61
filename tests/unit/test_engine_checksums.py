"""Checksums of files that a real engine writes, in every way in which their rows can come; and what it costs to have them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import xxhash

from engine.offline import Completion, LocalTarget, OfflineEngine
from engine.request import EngineRequest, SamplingParams
from engine.saves.selection import RowSelection
from engine.saves.spec import SaveSpec
from tests.unit.small_engine import save_tiny_llama, small_config

PROMPTS = [[(7 * i + j) % 90 + 3 for j in range(100)] for i in range(6)]
TEXT: dict[str, object] = {"include_output_tokens": True}
LITTLE = 4096
"""More than what else a process reads while it saves."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


def request(path: Path, prompt: list[int], *, max_tokens: int = 0, **fields: object) -> EngineRequest:
    values: dict[str, object] = {"layers": (0, 1, 2, "norm"), "dtype": "float32", **fields}
    save = SaveSpec(path.name, LocalTarget(path), **values)  # type: ignore[arg-type]  # fields of a test
    return EngineRequest(path.name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), save)


def assert_checksums(completions: list[Completion], folder: Path) -> None:
    for completion in completions:
        assert completion.file is not None, completion.error
        assert completion.file.checksum is not None
        data = (folder / completion.request_id).read_bytes()
        digests = {"sha256": hashlib.sha256(data).hexdigest(), "xxh3": xxhash.xxh3_64(data).hexdigest()}
        algorithm, _, digest = completion.file.checksum.partition(":")
        assert digest == digests[algorithm]
        assert len(data) == completion.file.bytes


def bytes_read() -> int:
    """By the whole process so far, as the kernel counts them."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.parametrize("checksum", ["sha256", "xxh3"])
def test_files_of_prompts_are_not_read_for_their_checksums(folder: Path, tmp_path: Path, checksum: str) -> None:
    forms: list[dict[str, object]] = [
        {},
        {"dtype": "float8_e4m3fn"},
        {"rows": RowSelection(((3, 40), (-20, None)))},
        {"pooling": "mean"},
        {"include_output_tokens": True, "max_tokens": 1},  # whose row is never computed
        {"max_tokens": 5},
    ]
    with OfflineEngine(small_config(folder, checksum=checksum, max_batch_tokens=16)) as engine:
        requests = [request(tmp_path / f"{i}", PROMPTS[i], **form) for i, form in enumerate(forms)]  # type: ignore[arg-type]
        before = bytes_read()
        completions = engine.generate(requests)
        num_read = bytes_read() - before
    assert_checksums(completions, tmp_path)
    assert sum(completion.file.bytes for completion in completions if completion.file) > 150_000
    assert num_read < LITTLE


@pytest.mark.parametrize("checksum", ["sha256", "xxh3"])
def test_checksums_of_generated_texts_are_right_also_when_preempted_and_from_the_cache(folder: Path, tmp_path: Path, checksum: str) -> None:
    forms: list[dict[str, object]] = [
        {},
        {"dtype": "float8_e4m3fn"},
        {"rows": RowSelection(((3, 40), (-20, None)))},
        {"pooling": "mean"},
        {"include_last_token": True},
        {"dtype": "bfloat16", "layers": (1,)},
    ]
    settings = {"kv_cache_tokens": 256, "max_batch_tokens": 32, "state_cache_memory": 1 << 19}
    with OfflineEngine(small_config(folder, checksum=checksum, **settings)) as engine:
        crowd = [request(tmp_path / f"{i}", PROMPTS[i][:60], max_tokens=40, **TEXT, **form) for i, form in enumerate(forms)]  # type: ignore[arg-type]
        assert_checksums(engine.generate(crowd), tmp_path)
        assert engine.engine.stats().preemptions_total
        for name in ("cold", "cached"):
            assert_checksums(engine.generate([request(tmp_path / name, PROMPTS[0][:60], max_tokens=40, **TEXT)]), tmp_path)  # type: ignore[arg-type]
        assert engine.engine.stats().state_hit_rows_total
