"""Puts an engine together from its settings: model, caches, writer, and what was resolved on the way."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.api import CacheGroupInfo, EngineInfo
from engine.attention.facade import GroupCache
from engine.attention.select import candidates_with, needs_of, select_backend
from engine.cache.groups import CacheGroup, make_group
from engine.cache.kv import KVCache
from engine.cache.sizing import kv_blocks, state_pages
from engine.cache.spec import LayerKV, group_layers
from engine.cache.states import StateStore
from engine.capture.sink import DirectSink, RowSink, StagedSink
from engine.config import EngineConfig, Switch
from engine.core import CoreParts
from engine.device.allocator import keep_freed_memory
from engine.device.host import usable_cpus
from engine.device.resolve import dtype_name, resolve_device, resolve_dtype, use_device
from engine.errors import ConfigError
from engine.execution.recording import GraphRecording, recorder_for
from engine.execution.runner import ModelRunner, caches_of
from engine.execution.self_check import check_model
from engine.models.base import Model, ModelConfig
from engine.models.blocks.linear import choose_linears
from engine.models.blocks.ops import NativeOps
from engine.models.loader import load_model, read_model_config
from engine.native.compiler import NoKernels
from engine.native.kernels import Kernels, load_kernels
from engine.sampling.sampler import Sampler
from engine.saves.spec import SaveEvent
from engine.saves.writer import SaveJob, SaveWriter
from engine.scheduling.limits import RequestLimits
from engine.scheduling.prefix import PrefixFinder
from engine.scheduling.save_plan import SavePlan
from engine.scheduling.scheduler import Scheduler

_BATCH_TOKENS_ON_CPU, _BATCH_TOKENS_ON_GPU = 2048, 8192
_INTER_TOKEN_MS_ON_CPU, _INTER_TOKEN_MS_ON_GPU = 150.0, 50.0
_STAGED_LAYERS = 8
"""How many layers of a full step the staging buffer of a GPU holds."""


@dataclass(frozen=True)
class EngineParts:
    """Everything that lives as long as the engine."""

    info: EngineInfo
    core: CoreParts
    writer: SaveWriter
    threads: int

    def begin_save(self, plan: SavePlan | None) -> SaveJob | None:
        """The writer's job for a request's save (None: it has none). Nothing that grows with the request is done here."""
        return None if plan is None else self.writer.begin(plan.spec, num_rows=plan.num_rows, max_rows=plan.max_rows, end=plan.end)


def build_engine(
    config: EngineConfig, on_save: Callable[[SaveEvent], None], progress: Callable[[int, int], None] | None = None
) -> EngineParts:
    """Loads the model and sizes the caches. Raises `ConfigError` for what can't work."""
    folder = Path(config.model)
    described = read_model_config(folder)
    device = resolve_device(config.device)
    use_device(device)
    dtype = resolve_dtype(config.dtype, described.checkpoint_dtype, device)
    max_model_len = _max_model_len(config, described)
    threads = config.threads or usable_cpus()
    torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()
    kernels, kernels_reason = _kernels(config.native_kernels, device, dtype, threads)
    ops = None if kernels is None else NativeOps(kernels)
    linears, packed_reason = choose_linears(config.packed_weights, dtype, device)
    model = load_model(folder, device=device, dtype=dtype, max_model_len=max_model_len, ops=ops, linears=linears, progress=progress)
    parts = assemble(model, config, on_save, max_model_len=max_model_len, threads=threads, kernels=kernels)
    info = replace(
        parts.info, native_kernels=kernels_reason, packed_weights=packed_reason, self_check=_self_check(parts, config, model.dtype)
    )
    return replace(parts, info=info)


def _self_check(parts: EngineParts, config: EngineConfig, dtype: torch.dtype) -> str:
    """Its outcome. Raises `ConfigError` where it fails."""
    if not config.self_check:
        return "off"
    model = parts.info.model
    error = check_model(
        parts.core.runner,
        parts.core.kv,
        num_layers=model.num_layers,
        vocab_size=model.vocab_size,
        max_model_len=parts.info.max_model_len,
        dtype=dtype,
        routes=model.has_experts,
    )
    which = "rows differ by at most" if dtype == torch.float32 and not model.has_experts else "the median row differs by"
    return f"passed: {which} {error:.1e} between a prompt computed at once and in parts"


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
    needs = needs_of(
        [kind for kind in model.cache_layers() if isinstance(kind, LayerKV)],
        device,
        dtype,
        config.block_size,
        soft_caps=model.config.soft_caps,
        sinks=model.config.attention_sinks,
    )
    attention = select_backend(config.attention, needs, candidates_with(kernels))
    block_size, page_size = attention.block_size, config.state_page_size
    num_pages = state_pages(config, page_size, described.hidden_size, dtype)
    states = StateStore(num_pages, page_size, described.hidden_size, dtype, poison=config.poison)
    batch_tokens = config.max_batch_tokens or (_BATCH_TOKENS_ON_GPU if device.type == "cuda" else _BATCH_TOKENS_ON_CPU)
    sink = _sink(states, batch_tokens, device)
    # After all else that takes memory of the device: this takes a share of what is left.
    specs = group_layers(model.cache_layers(), block_size, dtype, config.snapshot_distance)
    for spec in specs:
        if spec.border is not None and not spec.is_recurrent and spec.border % block_size:
            raise ConfigError(f"the model attends in chunks of {spec.border} tokens, of which --block-size {block_size} must be a divisor")
    attending = [spec for spec in specs if not spec.is_recurrent]
    workspace_bytes = attention.backend.workspace_bytes(attending, max_model_len, batch_tokens)
    recording = GraphRecording(
        config.cuda_graphs,
        model,
        attention.backend,
        max_len=max_model_len,
        max_batch=config.max_running,
        make_recorder=recorder_for,
    )
    others = workspace_bytes + (recording.bytes_needed(specs) if config.sizes_kv_cache else 0)
    counts = kv_blocks(specs, config, max_model_len, device, max_batch_tokens=batch_tokens, workspace_bytes=others)
    kv = KVCache([make_group(spec, count, device, poison=config.poison) for spec, count in zip(specs, counts, strict=True)])
    if config.prefault_caches and device.type == "cpu" and not config.poison:
        _touch(states, kv)
    caches = caches_of(kv.groups)
    graphs = recording.record([cache for cache in caches if isinstance(cache, GroupCache)])
    prefixes = PrefixFinder(kv, page_size, enabled=config.prefix_cache)
    limits = RequestLimits(
        described.num_layers,
        described.vocab_size,
        max_model_len,
        kv,
        page_size,
        num_pages - 1,
        sink.capacity,
        config.prompt_logprobs_memory,
        described.has_head,
    )
    scheduler = Scheduler(
        kv,
        prefixes,
        max_batch_tokens=batch_tokens,
        max_running=config.max_running,
        max_capture_rows=sink.capacity,
        inter_token_seconds=resolve_inter_token_ms(config, device) / 1000,
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
        kv_cache_tokens=kv.num_tokens,
        state_cache_rows=(num_pages - 1) * page_size,
        state_page_size=page_size,
        cache_groups=tuple(map(_group_info, kv.groups)),
        attention_workspace_bytes=workspace_bytes,
        cuda_graphs=recording.status,
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
    runner = ModelRunner(model, caches, sink, attention.backend, graphs)
    sampler = Sampler(described.vocab_size, device)
    overlap = config.overlap == "on" or (config.overlap == "auto" and device.type == "cuda")
    core = CoreParts(
        kv, states, scheduler, prefixes, runner, sampler, limits, eos, device, config.prefix_cache, config.trim_last_layer, overlap
    )
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


def _max_model_len(config: EngineConfig, described: ModelConfig) -> int:
    if config.max_model_len is None:
        return described.max_model_len
    if config.max_model_len > described.max_model_len and not described.extendable:
        raise ConfigError(f"--max-model-len {config.max_model_len} is above what the model was made for, {described.max_model_len}")
    return config.max_model_len


def resolve_inter_token_ms(config: EngineConfig, device: torch.device) -> float:
    """How long a step beside text may take, in milliseconds; 0: no limit."""
    if config.inter_token_ms is not None:
        return config.inter_token_ms
    return _INTER_TOKEN_MS_ON_CPU if device.type == "cpu" else _INTER_TOKEN_MS_ON_GPU


def _group_info(group: CacheGroup) -> CacheGroupInfo:
    spec, total = group.spec, group.pool.num_blocks
    wasted = sum(tensor.nbytes for tensor in group.tensors) - total * spec.bytes_per_block
    return CacheGroupInfo(spec.kind_name, len(spec.layers), spec.block_size, group.pool.total, spec.bytes_per_block, wasted)


def _touch(states: StateStore, kv: KVCache) -> None:
    """Poisoned caches have been written to already, and a GPU's memory is there at once."""
    states.touch()
    for group in kv.groups:
        group.touch()


def _sink(states: StateStore, batch_tokens: int, device: torch.device) -> RowSink:
    if device.type == "cpu":
        return DirectSink(states.rows)
    return StagedSink(states.rows, batch_tokens * _STAGED_LAYERS, device)
