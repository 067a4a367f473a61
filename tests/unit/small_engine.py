"""A real engine with a tiny model, and a listener that keeps what it hears and can be told to fail."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.offline import LocalTarget
from engine.request import EngineRequest, RequestOutput, SamplingParams
from engine.saves.spec import SaveEvent, SaveSpec

PROMPT = [5, 9, 30, 7, 8, 60, 11, 3, 17]


def save_tiny_llama(folder: Path) -> None:
    """Two narrow layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def small_config(folder: Path, **settings: object) -> EngineConfig:
    known: dict[str, object] = {
        "dtype": "float32",
        "kv_cache_tokens": 512,
        "block_size": 8,
        "state_page_size": 8,
        "state_cache_memory": 1 << 17,
    }
    known |= {"device": "cpu", "threads": 1, "durability": "none", "poison": True}
    return EngineConfig(str(folder), **{**known, **settings})  # type: ignore[arg-type]  # settings of a test


def make_request(name: str, path: Path | None = None, *, max_tokens: int = 4, seed: int | None = None) -> EngineRequest:
    """Greedy without a seed. With a path it saves all rows to a file of that name."""
    save = None if path is None else SaveSpec(f"save-{name}", LocalTarget(path / name), (1, "norm"), "float32", include_output_tokens=True)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0 if seed is None else 1.5, seed=seed, ignore_eos=True)
    return EngineRequest(name, PROMPT, sampling, save)


class Recorder:
    """Counts ends, so that a request that is answered twice or never is noticed."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.events: dict[str, list[SaveEvent]] = {}
        self.died: list[BaseException] = []
        self.ended = threading.Event()
        """The engine has died."""
        self.step_error: BaseException | None = None
        self.save_error: BaseException | None = None
        self.dead_error: BaseException | None = None

    def on_step(self, outputs: Sequence[RequestOutput], num_tokens: int, seconds: float) -> None:
        if self.step_error is not None and outputs:
            raise self.step_error
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def on_save(self, event: SaveEvent) -> None:
        if self.save_error is not None and event.status not in ("running", "writing"):
            raise self.save_error
        self.events.setdefault(event.save_id, []).append(event)

    def on_dead(self, error: BaseException) -> None:
        self.died.append(error)
        self.ended.set()
        if self.dead_error is not None:
            raise self.dead_error

    def ends(self, request_id: str) -> list[tuple[str | None, type[BaseException]]]:
        """Of all last outputs of a request: why it ended, and the type of its error."""
        return [(o.finish_reason, type(o.error)) for o in self.outputs.get(request_id, []) if o.finish_reason is not None]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def last_status(self, save_id: str) -> str:
        return self.events[save_id][-1].status
