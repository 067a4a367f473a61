"""What is asked of every system under test."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

DATA = Path(__file__).parent / "data" / "workload.json"
Prompts = list[list[int]]
LAYERS = (2, 15, 28, 30)


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, what to save of them, and how many are asked at once."""

    name: str
    prompts: Prompts
    layers: tuple[int, ...]
    max_tokens: int
    concurrency: int
    save_dtype: str = "bfloat16"
    include_output_tokens: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    def rows_of(self, prompt: Sequence[int]) -> int:
        """Rows of the file of one prompt: the last token is never fed to the model."""
        return len(prompt) + (max(0, self.max_tokens - 1) if self.include_output_tokens else 0)

    def limited(self, count: int | None) -> "Workload":
        """The same with the first `count` prompts only."""
        return replace(self, prompts=self.prompts[:count])


def extraction(concurrency: int) -> Workload:
    """64 prompts of prose, of which nothing but the hidden states is wanted."""
    return Workload("extraction", _prompts("prefill"), LAYERS, max_tokens=1, concurrency=concurrency)


def generation(concurrency: int, max_tokens: int = 128) -> Workload:
    """16 prompts of prose that are gone on with; the states of what is generated are wanted too."""
    return Workload("generation", _prompts("decode"), LAYERS, max_tokens, concurrency, include_output_tokens=True)


def up_to_the_middle(workload: Workload, num_layers: int) -> Workload:
    """The same prompts with the layers of the lower half only, and nothing sampled."""
    layers = tuple(layer for layer in workload.layers if layer <= num_layers // 2)
    return replace(workload, name=f"{workload.name}, up to the middle", layers=layers, max_tokens=0)


def shared_prefixes(concurrency: int, num_prefixes: int = 8, prefix_tokens: int = 512, continuations: int = 16) -> Workload:
    """Every prefix with every one of its continuations, which are of 16 to 46 tokens; those of one prefix come one after the other."""
    tokens = chain.from_iterable(_prompts("prefill"))
    prefixes = [list(islice(tokens, prefix_tokens)) for _ in range(num_prefixes)]
    prompts = [prefix + list(islice(tokens, 16 + 2 * number)) for prefix in prefixes for number in range(continuations)]
    return Workload("shared prefixes", prompts, LAYERS, max_tokens=1, concurrency=concurrency)


def random_prompt(length: int, vocab_size: int, seed: int) -> list[int]:
    """Token ids without a pattern (a linear congruential sequence), the same for the same seed."""
    tokens, state = [], seed
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append((state >> 33) % vocab_size)
    return tokens


def with_first_token(prompts: Prompts, token_id: int) -> Prompts:
    """The prompts with another first token, so that no prefix cache can answer from an earlier round."""
    return [[token_id, *prompt[1:]] for prompt in prompts]


def _prompts(kind: str) -> Prompts:
    """Token ids of the embedded model's tokenizer."""
    prompts: Prompts = json.loads(DATA.read_text())["smollm2"][kind]
    return prompts
