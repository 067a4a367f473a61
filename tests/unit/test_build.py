"""What an engine is put together with where the settings leave the choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine import build
from engine.build import EngineParts, build_engine, resolve_inter_token_ms
from engine.config import EngineConfig
from engine.errors import ConfigError
from tests.unit.small_engine import save_tiny_llama, small_config

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


@contextmanager
def built(folder: Path, **settings: object) -> Iterator[EngineParts]:
    threads = torch.get_num_threads()
    parts = build_engine(small_config(folder, **settings), lambda event: None)
    yield parts
    parts.writer.close()
    torch.set_num_threads(threads)


def test_there_are_as_many_compute_threads_as_processors_that_may_be_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "usable_cpus", lambda: 3)
    with built(folder, threads=None) as parts:
        assert (parts.threads, torch.get_num_threads()) == (3, 3)
    with built(folder, threads=2) as parts:
        assert (parts.threads, torch.get_num_threads()) == (2, 2)


def test_pages_have_their_own_size_whatever_the_block_size_is(folder: Path) -> None:
    with built(folder, block_size=8, state_page_size=5) as parts:
        assert (parts.info.block_size, parts.info.state_page_size) == (8, 5)
        assert parts.core.states.pages.shape[1] == parts.core.limits.page_size == 5
        assert parts.info.state_cache_rows == parts.core.states.pool.total * 5
    with pytest.raises(ConfigError, match="--state-page-size is 0"), built(folder, state_page_size=0):
        pass


def test_what_attention_can_take_beside_the_caches_is_told(folder: Path) -> None:
    with built(folder, native_kernels="off") as parts:
        backend, specs = parts.core.runner._attention, [group.spec for group in parts.core.kv.groups]  # type: ignore[attr-defined]  # a test looks in
        assert parts.info.attention_workspace_bytes == backend.workspace_bytes(specs, 128, parts.info.max_batch_tokens) > 0


@pytest.mark.parametrize(
    ("given", "device", "milliseconds"), [(None, CPU, 150), (None, GPU, 50), (0, CPU, 0), (0, GPU, 0), (12.5, CPU, 12.5), (80, GPU, 80)]
)
def test_how_long_text_waits_for_a_step_depends_on_the_device_unless_it_is_said(
    given: float | None, device: torch.device, milliseconds: float
) -> None:
    assert resolve_inter_token_ms(EngineConfig("model", inter_token_ms=given), device) == milliseconds
