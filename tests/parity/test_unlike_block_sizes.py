"""Block sizes of KV groups and of pages that have nothing to do with each other: each is honoured, and the rows are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from engine.attention.sdpa import SdpaBackend
from engine.build import assemble
from engine.cache.groups import make_group
from engine.cache.kv import KVCache
from engine.cache.pool import IntArray
from engine.cache.sizing import kv_blocks
from engine.cache.spec import group_layers
from engine.cache.states import StateStore
from engine.capture.sink import DirectSink, RowSink, StagedSink
from engine.config import EngineConfig
from engine.core import CoreParts, EngineCore
from engine.errors import ConfigError
from engine.execution.runner import ModelRunner, caches_of
from engine.models.base import Model
from engine.models.loader import load_model
from engine.request import EngineRequest, SamplingParams
from engine.sampling.sampler import Sampler
from engine.saves.spec import SaveSpec
from engine.scheduling.limits import RequestLimits
from engine.scheduling.prefix import PrefixFinder
from engine.scheduling.scheduler import Scheduler
from tests.parity.conftest import TinyModel
from tests.parity.exact import Errors, in_float64
from tests.parity.ways import Known, compute_known
from tests.unit.core_fakes import FakeJob, Listener, Target

CPU, MAX_LEN, BATCH_TOKENS = torch.device("cpu"), 700, 150
PREFIX = 530
NUM_TEXT = 6


@dataclass(frozen=True)
class Sizes:
    """Tokens per block of the full and of the sliding or recurrent group, and rows per page."""

    full: int
    sliding: int
    page: int


class SmallCore:
    """A real model and runner over caches of unlike block sizes, written by nobody."""

    def __init__(self, model: Model, sizes: Sizes, *, staged: bool, num_requests: int = 2) -> None:
        """The caches hold so many requests of full length."""
        self.layers = (*range(model.config.num_layers + 1), "norm")
        specs = tuple(
            replace(spec, block_size=sizes.full if spec.kind.window is None else sizes.sliding)
            for spec in group_layers(model.cache_layers(), 1, model.dtype)
        )
        config = EngineConfig("", kv_cache_tokens=num_requests * MAX_LEN)
        counts = kv_blocks(specs, config, MAX_LEN, CPU, max_batch_tokens=BATCH_TOKENS)
        self.kv = KVCache([make_group(spec, count, CPU, poison=True) for spec, count in zip(specs, counts, strict=True)])
        pages = -(-MAX_LEN // sizes.page) * len(self.layers) * 4 + 1
        self.store = StateStore(pages, sizes.page, model.config.hidden_size, model.dtype, poison=True)
        prefixes = PrefixFinder(self.kv, sizes.page, enabled=True)
        sink: RowSink = StagedSink(self.store.rows, 2000, CPU) if staged else DirectSink(self.store.rows)
        limits = RequestLimits(model.config.num_layers, model.config.vocab_size, MAX_LEN, self.kv, sizes.page, pages - 1, sink.capacity)
        scheduler = Scheduler(self.kv, prefixes, max_batch_tokens=BATCH_TOKENS, max_running=8, max_capture_rows=sink.capacity)
        runner = ModelRunner(model, caches_of(self.kv.groups), sink, SdpaBackend(CPU))
        self.listener = Listener()
        self.jobs: dict[str, FakeJob] = {}
        self.released: list[IntArray] = []
        sampler = Sampler(model.config.vocab_size, CPU)
        parts = CoreParts(self.kv, self.store, scheduler, prefixes, runner, sampler, limits, frozenset(), CPU, True)
        self.core = EngineCore(parts, self.listener, self.released.append)

    def add(self, name: str, prompt: list[int]) -> None:
        save = SaveSpec(name, Target(), self.layers, "float32", include_output_tokens=True)
        self.jobs[name] = FakeJob(save, self.store)
        self.core.add(EngineRequest(name, prompt, SamplingParams(max_tokens=NUM_TEXT, temperature=0), save), self.jobs[name])

    @torch.inference_mode()
    def run(self) -> None:
        for _ in range(500):
            if not self.core.has_work:
                break
            self.core.step()
            for job in self.jobs.values():
                job.write_all()
            while self.released:
                self.core.release_pages([self.released.pop()])
        assert not self.core.has_work
        self.core.check_integrity()

    def num_cached(self, name: str) -> int:
        return self.listener.outputs[name][-1].num_cached_tokens

    def check(self, name: str, known: Known, *, recurrent: bool = False) -> None:
        tokens = [token for output in self.listener.outputs[name] for token in output.token_ids]
        assert tokens == known.text[:NUM_TEXT]
        total = len(known.prompt) + NUM_TEXT - 1
        rows = torch.stack([self.jobs[name].rows[position] for position in range(total)])  # [tokens, layers, width]
        errors = Errors()
        for index, layer in enumerate(self.layers):
            errors.add(rows[:, index], known.reference.rows[layer][:total], known.reference.errors[layer][:total])
        errors.check(recurrent=recurrent)


def compute_prompts(tiny: TinyModel, lengths: Sequence[int]) -> tuple[Model, list[Known]]:
    """Three prompts, two with a common beginning."""
    generator = torch.Generator().manual_seed(3)
    first, second, third = (torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths)
    prompts = (first, first[:PREFIX] + second, third)
    model = load_model(tiny.folder, device=CPU, dtype=torch.float32, max_model_len=MAX_LEN)
    exact = in_float64(tiny.reference)
    return model, [compute_known(tiny.reference, prompt, exact) for prompt in prompts]


@pytest.fixture(scope="module")
def hybrid(tiny_model: Callable[..., TinyModel]) -> tuple[Model, list[Known]]:
    """Three layers with delta nets and one with attention."""
    return compute_prompts(tiny_model("qwen3_5", max_position_embeddings=1024), (570, 30, 61))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("sizes", "hit"),
    [
        (Sizes(528, 22, 22), 528),
        (Sizes(22, 528, 22), 528),
        (Sizes(16, 64, 16), 512),
        (Sizes(22, 66, 10), 330),
        (Sizes(7, 11, 1), 462),
    ],
)
def test_rows_and_text_are_right_wherever_recurrent_layers_have_their_snapshots(
    sizes: Sizes, hit: int, staged: bool, hybrid: tuple[Model, list[Known]]
) -> None:
    model, known = hybrid
    core = SmallCore(model, sizes, staged=staged)
    recurrent, attending = sorted(core.kv.groups, key=lambda group: not group.spec.is_recurrent)
    assert (attending.spec.block_size, recurrent.spec.block_size) == (sizes.full, sizes.sliding)
    if sizes.full == 7:
        assert recurrent.spec.bytes_per_block > attending.spec.bytes_per_block
    for group in core.kv.groups:
        assert sum(tensor.nbytes for tensor in group.tensors) == group.pool.num_blocks * group.spec.bytes_per_block, "padding"
    core.add("first", known[0].prompt)
    core.add("short", known[2].prompt)
    core.run()
    core.add("hit", known[1].prompt)
    core.run()
    assert core.num_cached("hit") == hit
    for name, expected in zip(("first", "hit", "short"), known, strict=False):
        core.check(name, expected, recurrent=True)


@pytest.fixture(scope="module")
def gemma(tiny_model: Callable[..., TinyModel]) -> tuple[Model, list[Known]]:
    """Six layers, every third with full attention, the others with a window of 30; three prompts, two with a common beginning."""
    return compute_prompts(tiny_model("gemma3", max_position_embeddings=1024, sliding_window=30), (570, 30, 61))


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("sizes", "hit"),
    [
        (Sizes(528, 22, 22), 528),
        (Sizes(22, 528, 22), 528),
        (Sizes(528, 22, 528), 528),
        (Sizes(528, 22, 16), 528),
        (Sizes(16, 22, 16), 528),
        (Sizes(16, 12, 10), 480),
        (Sizes(7, 11, 1), 462),
        (Sizes(16, 16, 24), 528),
    ],
)
def test_rows_and_text_are_right_whatever_the_block_sizes_are(
    sizes: Sizes, hit: int, staged: bool, gemma: tuple[Model, list[Known]]
) -> None:
    model, known = gemma
    core = SmallCore(model, sizes, staged=staged)
    core.add("first", known[0].prompt)
    core.add("short", known[2].prompt)
    core.run()
    core.add("hit", known[1].prompt)
    core.run()
    assert {group.tensors[0].shape[2] for group in core.kv.groups} == {sizes.full, sizes.sliding}
    assert core.store.pages.shape[1] == sizes.page
    assert core.num_cached("hit") == hit
    for name, expected in zip(("first", "hit", "short"), known, strict=False):
        core.check(name, expected)


@pytest.mark.parametrize("sizes", [Sizes(16, 16, 16), Sizes(32, 8, 10), Sizes(7, 11, 1)])
def test_rows_and_text_are_right_where_windows_have_room_for_one_request_and_its_chunk(
    sizes: Sizes, gemma: tuple[Model, list[Known]]
) -> None:
    model, known = gemma
    core = SmallCore(model, sizes, staged=False, num_requests=1)
    full, sliding = sorted((group for group in core.kv.groups), key=lambda group: group.spec.kind.window is not None)
    assert sliding.pool.total * sizes.sliding < 0.4 * full.pool.total * sizes.full
    for name, one in zip(("first", "second", "third"), known, strict=True):
        core.add(name, one.prompt)
    core.run()
    for name, one in zip(("first", "second", "third"), known, strict=True):
        core.check(name, one)


def test_a_page_of_states_may_be_larger_than_a_block_of_kv(tiny_model: Callable[..., TinyModel]) -> None:
    tiny = tiny_model("llama", num_attention_heads=8, num_key_value_heads=1, head_dim=4, num_hidden_layers=2)
    known = compute_known(tiny.reference, list(range(3, 53)))
    core = SmallCore(load_model(tiny.folder, device=CPU, dtype=torch.float32), Sizes(2, 2, 4), staged=False)
    assert core.store.pages[0, 0].nbytes > core.kv.groups[0].spec.bytes_per_block, "even a single row is"
    for name in ("cold", "hit"):
        core.add(name, known.prompt)
        core.run()
        core.check(name, known)
    assert core.num_cached("hit") == 48


@pytest.mark.parametrize(("size", "starts"), [(8, True), (12, False), (32, False)])
def test_blocks_divide_the_chunks_that_a_model_attends_in(tiny_model: Callable[..., TinyModel], size: int, starts: bool) -> None:
    tiny = tiny_model("llama4")
    model = load_model(tiny.folder, device=CPU, dtype=torch.float32, max_model_len=100)
    config = EngineConfig("", kv_cache_tokens=512, block_size=size, state_cache_memory=1 << 17, durability="none")

    def start() -> None:
        assemble(model, config, lambda event: None, max_model_len=100, threads=1).writer.close()

    if starts:
        start()
        return
    with pytest.raises(ConfigError, match=f"attends in chunks of 16 tokens, of which --block-size {size} must be a divisor"):
        start()
