"""What is asked of every system under test."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

DATA = Path(__file__).parent / "data" / "workload.json"
Prompts = list[list[int]]


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, what to save of them, and how many are asked at once."""

    name: str
    prompts: Prompts
    layers: tuple[int, ...]
    max_tokens: int
    concurrency: int
    save_dtype: str = "bfloat16"

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    def limited(self, count: int | None) -> "Workload":
        """The same with the first `count` prompts only."""
        return replace(self, prompts=self.prompts[:count])


def prefill(concurrency: int, model_key: str = "smollm2") -> Workload:
    """64 prompts of prose, of which nothing but the hidden states is wanted."""
    data = json.loads(DATA.read_text())[model_key]
    return Workload("prefill", data["prefill"], tuple(data["layers"]), max_tokens=1, concurrency=concurrency)


def with_first_token(prompts: Prompts, token_id: int) -> Prompts:
    """The prompts with another first token, so that no prefix cache can answer from an earlier round."""
    return [[token_id, *prompt[1:]] for prompt in prompts]
