"""The ways in which the engine can run a request. In each of them rows and text must be those of transformers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from engine.attention.sdpa import SdpaContext
from engine.config import EngineConfig, Switch
from engine.layers import LayerId
from engine.models.configuration.families import read_decoder_config
from engine.offline import Completion, LocalTarget, OfflineEngine
from engine.request import EngineRequest, SamplingParams
from engine.saves.selection import ALL_ROWS, LAST_ROW, RowSelection
from engine.saves.spec import SaveSpec
from tests.parity.exact import Errors, KnownRows, in_float64, known_rows

NUM_GREEDY = 64
NUM_OTHERS = 32
BLOCK_SIZE = 8


@dataclass(frozen=True)
class Known:
    """A prompt, and what transformers makes of it."""

    prompt: list[int]
    text: list[int]
    """The greedy continuation, `NUM_GREEDY` tokens."""
    reference: KnownRows
    """Of prompt and text."""

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.text


@torch.inference_mode()
def compute_known(reference: PreTrainedModel, prompt: list[int], exact: PreTrainedModel | None = None) -> Known:
    """One generation in float32 and one forward over prompt and text in each precision; rows of a beginning are the beginning of the rows.

    `exact` is `in_float64(reference)`, where it is there already.
    """
    generated = reference.generate(torch.tensor([prompt]), max_new_tokens=NUM_GREEDY, do_sample=False, eos_token_id=None, pad_token_id=0)
    token_ids = generated[0].tolist()
    rows = known_rows(reference, token_ids, exact or in_float64(reference))
    assert rows.logits[len(prompt) - 1 : -1].argmax(-1).tolist() == token_ids[len(prompt) :], "the reference must agree with itself"
    return Known(prompt, token_ids[len(prompt) :], rows)


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and what transformers says of a few prompts. The second prompt begins like the first; the last is the shortest."""

    folder: Path
    known: Sequence[Known]
    all_windowed: bool = False
    """Whether no layer keeps more KV than its sliding window."""

    @property
    def layers(self) -> tuple[LayerId, ...]:
        return tuple(self.known[0].reference.rows)

    @property
    def num_layers(self) -> int:
        return len(self.layers) - 2

    @property
    def attending(self) -> list[int]:
        """Layers with attention."""
        config = read_decoder_config(self.folder)
        return [layer for layer in range(self.num_layers) if layer not in config.recurrent_layers | config.without_mixer]

    @property
    def num_shared(self) -> int:
        first, second = self.known[0].prompt, self.known[1].prompt
        return next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)


@dataclass(frozen=True)
class Saved:
    """A request that has been run, and its file."""

    request: EngineRequest
    completion: Completion
    tensors: dict[str, torch.Tensor]


@dataclass
class Session:
    """A running engine."""

    offline: OfflineEngine
    subject: Subject
    folder: Path
    saves: int = field(default=0)

    def request(
        self,
        token_ids: list[int],
        *,
        max_tokens: int = 0,
        layers: tuple[LayerId, ...] | None = None,
        salt: str = "",
        rows: RowSelection = ALL_ROWS,
        output: bool = False,
        last: bool = False,
    ) -> EngineRequest:
        """A greedy request that saves `layers` (all of them where not said), float32."""
        self.saves += 1
        target = LocalTarget(self.folder / f"{self.saves}.safetensors")
        save = SaveSpec(f"{self.saves:032x}", target, layers or self.subject.layers, "float32", output, last, rows)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return EngineRequest(f"r{self.saves}", token_ids, sampling, save, cache_salt=salt)

    def run(self, *requests: EngineRequest) -> list[Saved]:
        """Runs them together."""
        completions = self.offline.generate(requests)
        self.offline.engine.check_integrity()
        saved = []
        for request, completion in zip(requests, completions, strict=True):
            assert completion.error is None
            assert completion.finish_reason == "length"
            tensors = load_file(request.save.target.path) if request.save else {}
            saved.append(Saved(request, completion, tensors))
        return saved

    def run_in_turn(self, *requests: EngineRequest) -> list[Saved]:
        return [saved for request in requests for saved in self.run(request)]


Way = Callable[["Workbench"], list[Saved]]


@dataclass(frozen=True)
class Workbench:
    """Starts engines for a subject."""

    subject: Subject
    folder: Path
    packed_weights: Switch = "off"
    overlap: Switch = "auto"

    @contextmanager
    def engine(self, **settings: object) -> Iterator[Session]:
        """An engine whose dead blocks and pages, and the null block, are NaN."""
        width = next(iter(self.subject.known[0].reference.rows.values())).shape[1]
        longest = max(len(known.token_ids) for known in self.subject.known)
        defaults: dict[str, object] = {
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": longest,
            "block_size": BLOCK_SIZE,
            "state_page_size": BLOCK_SIZE,
            "snapshot_distance": BLOCK_SIZE,
            "kv_cache_tokens": longest * 8,
            "state_cache_memory": longest * len(self.subject.layers) * 6 * width * 4,
            "threads": torch.get_num_threads(),
            "durability": "none",
            "poison": True,
            "packed_weights": self.packed_weights,
            "overlap": self.overlap,
        }
        with OfflineEngine(EngineConfig(str(self.subject.folder), **{**defaults, **settings})) as offline:
            yield Session(offline, self.subject, self.folder)
        gc.collect()  # an engine is full of cycles, and of memory


def compare(subject: Subject, saved: Sequence[Saved]) -> Errors:
    """Text must be identical; how far the rows are off is returned."""
    errors = Errors()
    for one in saved:
        prompt, token_ids = list(one.request.prompt_token_ids), one.completion.token_ids
        known = next(known for known in subject.known if known.token_ids[: len(prompt)] == prompt)
        if prompt == known.prompt:
            assert token_ids == known.text[: len(token_ids)]
        assert len(token_ids) == one.request.sampling.max_tokens
        _compare_rows(known, one, errors)
    return errors


def _compare_rows(known: Known, one: Saved, errors: Errors) -> None:
    save = one.request.save
    assert save is not None
    kept = expected_rows(one)
    rows = one.tensors["hidden_states"]
    assert rows.shape[:2] == (len(kept), len(save.layers))
    assert one.tensors["token_ids"].tolist() == [known.token_ids[position] for position in kept]
    for index, layer in enumerate(save.layers):
        errors.add(rows[:, index], known.reference.rows[layer][kept], known.reference.errors[layer][kept])


def expected_rows(one: Saved) -> list[int]:
    """The positions that the request's file should hold, worked out with Python's own slices."""
    save, total = one.request.save, len(one.request.prompt_token_ids)
    assert save is not None
    if save.include_output_tokens or save.include_last_token:
        total += one.request.sampling.max_tokens - (not save.include_last_token)
    positions = list(range(total))
    return sorted({position for start, end in save.rows.pairs for position in positions[start:end]})


def cold(bench: Workbench) -> list[Saved]:
    """One at a time, 64 tokens of text, with a row for the last one too."""
    with bench.engine() as engine:
        known = bench.subject.known
        requests = [engine.request(k.prompt, max_tokens=NUM_GREEDY, last=True, salt=str(i)) for i, k in enumerate(known)]
        saved = engine.run_in_turn(*requests)
        assert [one.completion.num_cached_tokens for one in saved] == [0] * len(saved)
        return saved


def chunked(size: int, bench: Workbench) -> list[Saved]:
    """At most `size` tokens a step, over all requests."""
    known = bench.subject.known[-1:] if size == 1 else bench.subject.known
    with bench.engine(max_batch_tokens=size, prefix_cache=False) as engine:
        saved = engine.run(*(engine.request(k.prompt, max_tokens=4, output=True) for k in known))
        assert engine.offline.engine.stats().computed_tokens_total == sum(len(k.prompt) + 3 for k in known)
        return saved


def all_from_pages(bench: Workbench) -> list[Saved]:
    """Nothing is computed the second time, since every row lies in a page."""
    prompt = bench.subject.known[0].prompt
    prompt = prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE]
    with bench.engine() as engine:
        first = engine.run(engine.request(prompt))
        second = engine.run(engine.request(prompt))
        stats = engine.offline.engine.stats()
        assert stats.computed_tokens_total == len(prompt)
        assert stats.state_hit_rows_total == len(prompt) * len(bench.subject.layers)
        assert second[0].completion.num_cached_tokens == len(prompt)
        return first + second


def full_hit(bench: Workbench) -> list[Saved]:
    """All but the last block is in the cache, and text follows."""
    prompt = bench.subject.known[0].prompt
    with bench.engine() as engine:
        first = engine.run(engine.request(prompt))
        second = engine.run(engine.request(prompt, max_tokens=NUM_GREEDY, output=True))
        cached = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert second[0].completion.num_cached_tokens == cached > 0
        assert engine.offline.engine.stats().state_hit_rows_total == cached * len(bench.subject.layers)
        return first + second


def partial_hit(bench: Workbench) -> list[Saved]:
    """The second prompt begins like the first."""
    first, second = bench.subject.known[:2]
    with bench.engine() as engine:
        saved = engine.run_in_turn(*(engine.request(k.prompt, max_tokens=8, output=True) for k in (first, second)))
        cached = bench.subject.num_shared // BLOCK_SIZE * BLOCK_SIZE
        assert saved[1].completion.num_cached_tokens == cached > 0
        assert engine.offline.engine.stats().state_hit_rows_total == cached * len(bench.subject.layers)
        return saved


def hit_in_text(bench: Workbench) -> list[Saved]:
    """The prompt goes on with what was generated before, as the next turn of a chat does."""
    known = bench.subject.known[0]
    prompt = known.token_ids[: len(known.prompt) + 40]
    with bench.engine() as engine:
        first = engine.run(engine.request(known.prompt, max_tokens=NUM_GREEDY, output=True))
        second = engine.run(engine.request(prompt, max_tokens=1))
        assert second[0].completion.num_cached_tokens == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE > len(known.prompt)
        return first + second


def pages_gone(bench: Workbench) -> list[Saved]:
    """KV of the whole prompt is cached, and one layer's pages; those of the other layers only of its beginning."""
    prompt = bench.subject.known[0].prompt
    beginning = prompt[: 2 * BLOCK_SIZE]
    with bench.engine() as engine:
        first = engine.run(engine.request(beginning))
        second = engine.run(engine.request(prompt, max_tokens=1, layers=(1,)))
        before = engine.offline.engine.stats().state_hit_rows_total
        third = engine.run(engine.request(prompt, max_tokens=8, output=True))
        assert third[0].completion.num_cached_tokens == len(beginning)
        assert engine.offline.engine.stats().state_hit_rows_total - before == len(beginning) * len(bench.subject.layers)
        return first + second + third


def preempted(prefix_cache: bool, bench: Workbench) -> list[Saved]:
    """All prompts fit the KV cache together, but not with their text. Windows that cross a block's border need one block more."""
    known = bench.subject.known[:2] * (5 if bench.subject.all_windowed else 1)
    fits = max(sum(len(k.prompt) for k in known[:2]) + 2 * BLOCK_SIZE, *(len(k.token_ids) for k in known))
    size = 2 * BLOCK_SIZE if bench.subject.all_windowed else BLOCK_SIZE
    with bench.engine(kv_cache_tokens=fits, prefix_cache=prefix_cache, block_size=size) as engine:
        requests = [engine.request(k.prompt, max_tokens=24, last=True, salt=str(i)) for i, k in enumerate(known)]
        saved = engine.run(*requests)
        assert engine.offline.engine.stats().preemptions_total > 0
        return saved


def few_pages(bench: Workbench) -> list[Saved]:
    """Pages for two blocks only: they go to the file and come back all the time."""
    width = next(iter(bench.subject.known[0].reference.rows.values())).shape[1]
    memory = 2 * len(bench.subject.layers) * BLOCK_SIZE * width * 4
    with bench.engine(state_cache_memory=memory) as engine:
        return engine.run(*(engine.request(k.prompt, max_tokens=4, last=True) for k in bench.subject.known))


def concurrent(bench: Workbench) -> list[Saved]:
    """One among 32 others of mixed lengths and layers, in small steps; what they save is compared too."""
    known, layers = bench.subject.known, bench.subject.layers
    with bench.engine(max_batch_tokens=100) as engine:
        requests = [engine.request(known[0].prompt, max_tokens=16, output=True)]
        for i in range(NUM_OTHERS):
            prompt = known[i % len(known)].prompt
            some = layers[i % len(layers) :: 2 + i % 3]
            length = 1 + i * 11 % min(len(prompt), 80)
            requests.append(engine.request(prompt[:length], max_tokens=i % 4, layers=some, salt=str(i)))
        saved = engine.run(*requests)
        assert [one.completion.num_cached_tokens for one in saved] == [0] * len(saved)
        return saved


@contextmanager
def _rows_per_layer() -> Iterator[dict[int, int]]:
    """Counts the rows that run through each decoder layer's attention."""
    rows: dict[int, int] = {}
    attend = SdpaContext.attend

    def counting(self: SdpaContext, layer: int, query: torch.Tensor, *args: object) -> torch.Tensor:
        rows[layer] = rows.get(layer, 0) + query.shape[0]
        return attend(self, layer, query, *args)

    with patch.object(SdpaContext, "attend", counting):
        yield rows


def depth_limited(bench: Workbench) -> list[Saved]:
    """Layers up to the middle, alone: none above it runs."""
    middle = bench.subject.num_layers // 2
    prompt = bench.subject.known[0].prompt
    with bench.engine() as engine, _rows_per_layer() as rows:
        saved = engine.run(engine.request(prompt, layers=(0, middle)))
    assert rows == {layer: len(prompt) for layer in bench.subject.attending if layer < middle}
    return saved


def depth_limited_among_others(bench: Workbench) -> list[Saved]:
    """In one batch with requests that need more layers, fewer, or none: each row runs only as deep as it must."""
    subject = bench.subject
    middle, prompts = subject.num_layers // 2, [k.prompt for k in subject.known]
    with bench.engine(max_batch_tokens=4096) as engine, _rows_per_layer() as rows:
        saved = engine.run(
            engine.request(prompts[1], layers=(0,), salt="a"),
            engine.request(prompts[0], layers=(0, middle), salt="b"),
            engine.request(prompts[1], salt="c"),
        )
    deep, shallow = len(prompts[1]), len(prompts[0]) + len(prompts[1])
    assert rows == {layer: shallow if layer < middle else deep for layer in subject.attending}
    return saved


def deeper_after_shallow(bench: Workbench) -> list[Saved]:
    """What a depth-limited request left in the KV cache is of no use to one that needs every layer, but the other way round it is."""
    prompt, middle = bench.subject.known[0].prompt, bench.subject.num_layers // 2
    with bench.engine() as engine:
        shallow = engine.run(engine.request(prompt, layers=(middle,)))
        deep = engine.run(engine.request(prompt, max_tokens=8, layers=(middle, "norm"), output=True))
        again = engine.run(engine.request(prompt, max_tokens=8, layers=(middle,), output=True))
        assert deep[0].completion.num_cached_tokens == 0
        assert again[0].completion.num_cached_tokens > 0
        return shallow + deep + again


def with_and_without_extraction(bench: Workbench) -> list[Saved]:
    """Side by side and with the same text; a plain request takes no page."""
    known = bench.subject.known[-2:]
    with bench.engine() as engine:
        sampling = SamplingParams(max_tokens=NUM_GREEDY, temperature=0, ignore_eos=True)
        plain = [EngineRequest(f"plain{i}", k.prompt, sampling, cache_salt=f"plain{i}") for i, k in enumerate(known)]
        alone = engine.run(plain[0])
        assert engine.offline.engine.stats().state_pages.cached == 0
        saving = [engine.request(k.prompt, max_tokens=NUM_GREEDY, output=True, salt=str(i)) for i, k in enumerate(known)]
        ran = engine.run(*plain[1:], *saving)
        texts = [one.completion.token_ids for one in [*alone, *ran]]
        assert texts == [k.text for k in known] * 2
        return ran[len(plain) - 1 :]


def output_tokens(bench: Workbench) -> list[Saved]:
    """Rows of generated tokens: all but the last one, or that one too."""
    known = bench.subject.known[-1]
    layers = bench.subject.layers[::2]
    with bench.engine() as engine:
        saved = engine.run(
            engine.request(known.prompt, max_tokens=10, layers=layers, salt="a"),
            engine.request(known.prompt, max_tokens=10, layers=layers, output=True, salt="b"),
            engine.request(known.prompt, max_tokens=10, layers=layers[:1], last=True, salt="c"),
            engine.request(known.prompt, max_tokens=1, layers=layers, output=True, salt="d"),
            engine.request(known.prompt, max_tokens=1, layers=layers, last=True, salt="e"),
        )
        length = len(known.prompt)
        assert [len(one.tensors["token_ids"]) for one in saved] == [length, length + 9, length + 10, length, length + 1]
        return saved


SELECTIONS = (LAST_ROW, RowSelection(((0, 3), (9, 12))), RowSelection(((-14, -2),)), RowSelection(((1, 2), (-9, -5), (-1, None))))


def row_selections(bench: Workbench) -> list[Saved]:
    """Some rows of the prompt, of prompt and text, and counted from an end that isn't known before."""
    known = bench.subject.known[-1]
    layers = bench.subject.layers[1::2]
    with bench.engine(max_batch_tokens=20) as engine:
        requests = []
        for rows in SELECTIONS:
            requests.append(engine.request(known.prompt, layers=layers, rows=rows))
            requests.append(engine.request(known.prompt, max_tokens=12, layers=layers, rows=rows, output=True))
            requests.append(engine.request(known.prompt, max_tokens=12, layers=layers, rows=rows, last=True))
        saved = engine.run(*requests)
        assert all(one.tensors["positions"].tolist() == expected_rows(one) for one in saved)
        return saved


WAYS: dict[str, Way] = {
    "cold": cold,
    "chunks of 1": partial(chunked, 1),
    "chunks of 7": partial(chunked, 7),
    "chunks of 64": partial(chunked, 64),
    "all rows from pages": all_from_pages,
    "full prefix hit": full_hit,
    "partial prefix hit": partial_hit,
    "prefix hit in generated text": hit_in_text,
    "some state pages gone": pages_gone,
    "preempted and resumed": partial(preempted, True),
    "preempted, no prefix cache": partial(preempted, False),
    "few pages": few_pages,
    "among 32 others": concurrent,
    "depth-limited": depth_limited,
    "depth-limited among others": depth_limited_among_others,
    "deeper after shallow": deeper_after_shallow,
    "with and without extraction": with_and_without_extraction,
    "output tokens": output_tokens,
    "row selections": row_selections,
}


def table(measured: dict[tuple[str, str], Errors]) -> str:
    """Family by way: largest relative L2 error of a row; and median, 99.9th percentile and largest, ours to transformers' float32."""
    families = list(dict.fromkeys(family for family, _ in measured))
    lines = ["| way | " + " | ".join(families) + " |", "|---" * (len(families) + 1) + "|"]
    for way in dict.fromkeys(way for _, way in measured):
        cells = [measured.get((family, way)) for family in families]
        lines.append(f"| {way} | " + " | ".join("" if cell is None else _cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _cell(errors: Errors) -> str:
    return f"{errors.row:.1e}; " + " / ".join(f"{ratio:.2f}" for ratio in errors.ratios())
