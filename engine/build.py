"""Puts an engine together from its settings: model, caches, writer, and what was resolved on the way."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.api import EngineInfo
from engine.attention.select import candidates_with, needs_of, select_backend
from engine.cache.kv import KVCache, KVGroup
from engine.cache.sizing import kv_blocks, state_pages
from engine.cache.spec import group_layers
from engine.cache.states import StateStore
from engine.capture.sink import DirectSink, RowSink, StagedSink
from engine.config import EngineConfig, Switch
from engine.core import CoreParts
from engine.device.allocator import keep_freed_memory
from engine.device.resolve import dtype_name, resolve_device, resolve_dtype
from engine.errors import ConfigError
from engine.execution.graphs import graphs_for
from engine.execution.runner import ModelRunner
from engine.models.base import Model
from engine.models.linear import choose_linears
from engine.models.loader import load_model, read_model_config
from engine.models.ops import NativeOps
from engine.native.compiler import NoKernels
from engine.native.kernels import Kernels, load_kernels
from engine.request import EngineRequest
from engine.saves.spec import SaveEvent
from engine.saves.writer import SaveEnd, SaveJob, SaveWriter
from engine.scheduling.limits import RequestLimits, saved_rows
from engine.scheduling.prefix import PrefixFinder
from engine.scheduling.scheduler import Scheduler

_BATCH_TOKENS_ON_CPU, _BATCH_TOKENS_ON_GPU = 2048, 8192
_MIXED_TOKENS_ON_CPU = 512
"""A step beside text that is being generated: a quarter of the longest wait for the next token."""
_STAGED_LAYERS = 8
"""How many layers of a full step the staging buffer of a GPU holds."""


@dataclass(frozen=True)
class EngineParts:
    """Everything that lives as long as the engine."""

    info: EngineInfo
    core: CoreParts
    writer: SaveWriter
    threads: int

    def begin_save(self, request: EngineRequest) -> SaveJob:
        """The writer's job for the request's save, with as much as is known of its length."""
        assert request.save is not None
        prompt, (lowest, highest) = request.prompt_token_ids, saved_rows(request)
        fewest, most = (_num_kept(request, total) for total in (lowest, highest))
        # Rows of the prompt alone: nothing of the file's end is left to be found out.
        end = partial(SaveEnd.of, request.save.rows, prompt, highest, len(prompt)) if highest == len(prompt) else None
        # The rows that each pair keeps grow or shrink steadily with the length, so equal ends mean a constant.
        return self.writer.begin(request.save, num_rows=sum(most) if fewest == most else None, max_rows=highest, end=end)


def _num_kept(request: EngineRequest, total: int) -> list[int]:
    assert request.save is not None
    return [high - low for low, high in request.save.rows.ranges(total)]


def build_engine(
    config: EngineConfig, on_save: Callable[[SaveEvent], None], progress: Callable[[int, int], None] | None = None
) -> EngineParts:
    """Loads the model and sizes the caches. Raises `ConfigError` for what can't work."""
    folder = Path(config.model)
    described = read_model_config(folder)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, described.checkpoint_dtype, device)
    max_model_len = _max_model_len(config, described.max_model_len)
    threads = config.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()
    kernels, kernels_reason = _kernels(config.native_kernels, device, dtype, threads)
    ops = None if kernels is None else NativeOps(kernels)
    linears, packed_reason = choose_linears(config.packed_weights, dtype, device)
    model = load_model(folder, device=device, dtype=dtype, max_model_len=max_model_len, ops=ops, linears=linears, progress=progress)
    parts = assemble(model, config, on_save, max_model_len=max_model_len, threads=threads, kernels=kernels)
    return replace(parts, info=replace(parts.info, native_kernels=kernels_reason, packed_weights=packed_reason))


def assemble(
    model: Model,
    config: EngineConfig,
    on_save: Callable[[SaveEvent], None],
    *,
    max_model_len: int,
    threads: int,
    kernels: Kernels | None = None,
) -> EngineParts:
    """An engine around a model that is there already. Raises `ConfigError`."""
    described, device, dtype = model.config, model.device, model.dtype
    needs = needs_of(model.kv_layers(), device, dtype, config.block_size)
    attention = select_backend(config.attention, needs, candidates_with(kernels))
    block_size = attention.block_size
    width = described.hidden_size
    num_pages = state_pages(config, block_size, width, dtype)
    states = StateStore(num_pages, block_size, width, dtype, pinned=device.type == "cuda", poison=config.poison)
    batch_tokens = config.max_batch_tokens or (_BATCH_TOKENS_ON_GPU if device.type == "cuda" else _BATCH_TOKENS_ON_CPU)
    sink = _sink(states, batch_tokens, device)
    # After all else that takes memory of the device: this takes a share of what is left.
    kv = _kv_cache(model, config, block_size, max_model_len)
    if config.prefault_caches and device.type == "cpu" and not config.poison:
        _touch(states, kv)
    prefixes = PrefixFinder(kv, block_size, enabled=config.prefix_cache)
    limits = RequestLimits(described.num_layers, described.vocab_size, max_model_len, kv, block_size, num_pages - 1, sink.capacity)
    scheduler = Scheduler(
        kv,
        prefixes,
        max_batch_tokens=batch_tokens,
        max_running=config.max_running,
        max_mixed_tokens=_MIXED_TOKENS_ON_CPU if device.type == "cpu" else None,
        max_capture_rows=sink.capacity,
    )
    info = EngineInfo(
        model=described,
        device=str(device),
        dtype=dtype_name(dtype),
        max_model_len=max_model_len,
        block_size=block_size,
        attention=attention.backend.name,
        attention_reason=attention.reason,
        max_batch_tokens=batch_tokens,
        kv_cache_tokens=min(group.pool.total * group.spec.block_size for group in kv.groups),
        state_cache_rows=(num_pages - 1) * block_size,
    )
    writer = SaveWriter(
        states.pages,
        on_save,
        threads=config.writer_threads,
        durability=config.durability,
        checksum=config.checksum,
        umask=config.umask,
    )
    eos = frozenset(described.eos_token_ids)
    graphs = None
    if config.cuda_graphs != "off":
        graphs = graphs_for(model, attention.backend, max_len=max_model_len, max_batch=config.max_running)
        if graphs is None and config.cuda_graphs == "on":
            raise ConfigError(f"--cuda-graphs is on, but attention {attention.backend.name} on {device.type} has none")
    runner = ModelRunner(model, kv, sink, attention.backend, graphs)
    overlap = config.overlap == "on" or (config.overlap == "auto" and device.type == "cuda")
    core = CoreParts(kv, states, scheduler, prefixes, runner, limits, eos, device, config.prefix_cache, config.trim_last_layer, overlap)
    return EngineParts(info, core, writer, threads)


def _kernels(switch: Switch, device: torch.device, dtype: torch.dtype, threads: int) -> tuple[Kernels | None, str]:
    """Compiled kernels where they can be had, and what there is to say of them. Raises `ConfigError` where they were asked for."""
    if switch == "off" or device.type != "cpu":
        return None, "off" if switch == "off" else f"not needed on {device.type}"
    try:
        return load_kernels(dtype, threads), "compiled for this processor"
    except NoKernels as error:
        if switch == "on":
            raise ConfigError(f"there are no native kernels: {error}") from error
        return None, str(error)


def _max_model_len(config: EngineConfig, checkpoint: int) -> int:
    if config.max_model_len is None:
        return checkpoint
    if config.max_model_len > checkpoint:
        raise ConfigError(f"--max-model-len {config.max_model_len} is above what the model was made for, {checkpoint}")
    return config.max_model_len


def _kv_cache(model: Model, config: EngineConfig, block_size: int, max_model_len: int) -> KVCache:
    specs = group_layers(model.kv_layers(), block_size, model.dtype)
    counts = kv_blocks(specs, config, max_model_len, model.device)
    return KVCache([KVGroup(spec, count, model.device, poison=config.poison) for spec, count in zip(specs, counts, strict=True)])


def _touch(states: StateStore, kv: KVCache) -> None:
    """Poisoned caches have been written to already, and a GPU's memory is there at once."""
    states.touch()
    for group in kv.groups:
        group.touch()


def _sink(states: StateStore, batch_tokens: int, device: torch.device) -> RowSink:
    if device.type == "cpu":
        return DirectSink(states.rows)
    return StagedSink(states.rows, batch_tokens * _STAGED_LAYERS, device)
