"""Starts the parts of a service, knows what state it is in, and takes it down again."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol, get_args

from engine.api import EngineAPI
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ModelError
from engine.layers import LayerId, default_layers, resolve_layers
from engine.models.checkpoints.prepared import Progress
from engine.models.checkpoints.source import ModelSource, resolve_model
from engine.stats import EngineListener
from service.config.settings import Settings, engine_config
from service.config.units import format_size
from service.engine_events import EngineEvents
from service.errors import NotServing
from service.loading import Loading, StartInterrupted
from service.observe.metrics import Metrics
from service.observe.tracing import start_tracing
from service.registry.registry import Registry
from service.saves.deletion import Deleter
from service.saves.paths.protected import check_model, check_roots
from service.saves.paths.roots import SaveRoots
from service.saves.reaper import Reaper
from service.saves.recovery import recover
from service.saves.saver import Saver
from service.saves.space import Space
from service.saves.targets import Targets
from service.services import ModelIdentity, Services
from service.shares import Shares
from service.text.chat_templates import ChatTemplates
from service.text.tokenizer import Tokenizer, TokenizerMissing
from service.threads import Threads

log = logging.getLogger(__name__)

RuntimeState = Literal["starting", "ok", "draining", "dead", "stopped"]
REPORT_STEP = 0.25
"""A line for every quarter of the weights."""
SHUTDOWN_TIMEOUT_SECONDS = 10.0
"""For what no answer waits for, once the engine has stopped and all saves have ended."""
DEATH_GRACE_SECONDS = 2.0
"""For answers to those who still waited when the engine failed."""


class StartableEngine(EngineAPI, Protocol):
    """An engine whose `start` blocks until the model is loaded."""

    def start(self, progress: Callable[[int, int], None] | None = None) -> None: ...


EngineFactory = Callable[[EngineConfig, EngineListener], StartableEngine]


class Runtime:
    """One service from start to end. Methods are called on the event loop; `start` once."""

    def __init__(self, settings: Settings, engine_factory: EngineFactory = Engine) -> None:
        """Raises `ConfigError` for settings of traces that can't work."""
        self.settings = settings
        self.metrics = Metrics()
        self.shares = Shares(settings.max_running + settings.max_queued)
        self.threads = Threads(self.shares)
        self.tracing = start_tracing(settings)
        self._state: RuntimeState = "starting"
        self.on_fatal: Callable[[], None] = lambda: None
        """Called when the engine has died and every request was answered."""
        self._make_engine = engine_factory
        self._services: Services | None = None
        self._cleanup_callbacks: list[Callable[[], None]] = []
        self._reaper: Reaper | None = None
        self._grace: asyncio.Task[None] | None = None
        self._loading = Loading()
        self.metrics.watch_state(lambda: self.state, get_args(RuntimeState))
        self.metrics.show_limits(max_running=settings.max_running, max_queued=settings.max_queued)

    @property
    def state(self) -> RuntimeState:
        """An engine that is dead says so before it answers those that it held, and before this hears of it otherwise."""
        return "dead" if self._services is not None and self._services.engine.state == "dead" else self._state

    @property
    def failed(self) -> bool:
        return self.state == "dead"

    @property
    def start_was_interrupted(self) -> bool:
        """A thread that loads may still be there, and nobody waits for it."""
        return self._loading.interrupted

    @property
    def ready(self) -> Services | None:
        """The parts as soon as they are there, in whatever state the service is."""
        return self._services

    @property
    def context_length(self) -> int:
        """In tokens; 0 as long as that isn't known."""
        return 0 if self._services is None else self._services.limits.max_model_len

    def services(self, *, for_new_work: bool) -> Services:
        """The parts. Raises `NotServing` before the start, after a fatal error and, for new work, while draining."""
        if self._services is not None and (self.state == "ok" or (self.state == "draining" and not for_new_work)):
            return self._services
        messages = {"starting": "the service is starting", "draining": "the service is shutting down", "dead": "the engine has failed"}
        code = "engine_dead" if self.state == "dead" else self.state
        raise NotServing(messages.get(self.state, "the service has stopped"), code=code)

    async def start(self) -> None:
        """Opens roots and registry, recovers from a crash, loads the model; returns early if interrupted. Raises `ConfigError`."""
        try:
            await self._start()
        except StartInterrupted:
            log.info("the start was interrupted")

    def interrupt_start(self) -> None:
        """Interrupts a start that is running: its waiters continue at once."""
        self._loading.interrupt()

    async def _start(self) -> None:
        loop, settings = asyncio.get_running_loop(), self.settings
        umask = _process_umask() if settings.umask is None else settings.umask
        roots, registry = await asyncio.to_thread(self._open_files)
        source = await self._loading.run(self._resolve_model)
        space = Space(registry, roots, max_saved_bytes=settings.max_saved_bytes, min_free_bytes=settings.min_free_bytes)
        saver = Saver(registry, roots, space, self.metrics, loop, threads=self.threads, lock_files=settings.lock_files)
        events = EngineEvents(self.metrics)
        events.bind(loop, saver.on_event, self._engine_died)
        engine = saver.engine = await self._start_engine(engine_config(settings, source.folder, umask), events)
        tokenizer = await self._loading.run(partial(_tokenizer, source))
        self._services = Services(
            settings=settings,
            engine=engine,
            identity=ModelIdentity(settings.served_model_name or source.name, source.revision),
            default_layers=_layers(settings, engine),
            tokenizer=tokenizer,
            templates=_templates(tokenizer),
            registry=registry,
            roots=roots,
            targets=Targets(roots, registry, lock_files=settings.lock_files, umask=umask, owner=registry.service_id),
            saver=saver,
            deleter=Deleter(saver),
            space=space,
            events=events,
            metrics=self.metrics,
            threads=self.threads,
            shares=self.shares,
            started=time.time(),
            tracing=self.tracing,
        )
        self._start_reaper(saver, space)
        _log_start(self._services)
        if self._state == "starting":
            self._state = "ok"

    async def drain(self) -> None:
        """Takes no new requests and waits for those that run, and their saves, for at most `drain_seconds`; aborts what is left."""
        if self.state not in ("starting", "ok"):
            return
        self._state = "draining"
        if self._services is None:
            self.interrupt_start()
            return
        engine = self._services.engine
        engine.drain()
        log.info("draining: running requests have %g seconds to finish", self.settings.drain_seconds)
        if not await asyncio.to_thread(engine.wait_idle, self.settings.drain_seconds):
            log.warning("requests were still running after %g seconds and are aborted", self.settings.drain_seconds)
            await asyncio.to_thread(engine.stop)
        self._services.saver.stop_retrying()

    async def stop(self) -> None:
        """Ends everything. What was under way is aborted; its records say so."""
        if self._grace is not None:
            self._grace.cancel()
        services = self._services
        await self._loading.unwound()
        if services is not None:
            services.saver.stop_retrying()
        if self._reaper is not None:
            await self._reaper.close()
        while self._cleanup_callbacks:
            await asyncio.to_thread(self._cleanup_callbacks.pop())
            if services is not None:  # the engine is the last that was started and the first that is stopped
                await services.saver.wait_idle()
                if services.background:
                    await asyncio.wait(services.background, timeout=SHUTDOWN_TIMEOUT_SECONDS)
        self.threads.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        if self.state != "dead":
            self._state = "stopped"

    async def _start_engine(self, config: EngineConfig, events: EngineEvents) -> EngineAPI:
        engine = self._make_engine(config, events)
        self._cleanup_callbacks.append(engine.stop)
        await self._loading.run(partial(engine.start, _progress_lines(self._loading.check)))
        self.metrics.watch_engine(engine.stats)
        return engine

    def _resolve_model(self) -> ModelSource:
        source = resolve_model(
            self.settings.model, cache=self.settings.state_dir / "models", progress=Progress(log.info, self._loading.check)
        )
        check_model(self.settings, source.folder)
        return source

    def _start_reaper(self, saver: Saver, space: Space) -> None:
        self._reaper = Reaper(saver.registry, saver.roots, space, lock_files=self.settings.lock_files)
        self._reaper.recover = saver.recover_all
        space.recount = self._reaper.recount
        self.metrics.watch_space(space)
        self._reaper.start()

    def _open_files(self) -> tuple[SaveRoots, Registry]:
        settings = self.settings
        check_roots(settings)
        roots = SaveRoots(
            [str(root) for root in settings.save_root],
            lock_files=settings.lock_files,
            umask=settings.umask,
            client_path_map=settings.client_path_map,
        )
        self._cleanup_callbacks.append(roots.close)
        registry = Registry(settings.state_dir, durability=settings.durability, keep_seconds=settings.keep_records)
        self._cleanup_callbacks.append(registry.close)
        recovered = recover(registry, roots)
        if recovered.completed or recovered.failed:
            log.warning("recovery after a crash: %d saves completed, %d failed", recovered.completed, recovered.failed)
        if recovered.unreachable:
            log.warning("%d saves stay open: their files lie below a folder that is no save root now", recovered.unreachable)
        return roots, registry

    def _engine_died(self, error: BaseException) -> None:
        log.critical("the engine has failed, the service ends", exc_info=error)
        self._state = "dead"
        self._grace = asyncio.get_running_loop().create_task(self._end_after_death())

    async def _end_after_death(self) -> None:
        if self._services is not None:
            await asyncio.sleep(DEATH_GRACE_SECONDS / 2)
            self._services.saver.fail_all("the engine has failed")
            await asyncio.sleep(DEATH_GRACE_SECONDS / 2)
        self.on_fatal()


def _process_umask() -> int:
    """The umask can only be read by setting it; this is done before any file is made."""
    umask = os.umask(0o022)
    os.umask(umask)
    return umask


def _layers(settings: Settings, engine: EngineAPI) -> tuple[LayerId, ...]:
    num_layers = engine.info.model.num_layers
    return default_layers(num_layers) if settings.layers is None else resolve_layers(settings.layers, num_layers, "--layers")


def _tokenizer(source: ModelSource) -> Tokenizer | None:
    try:
        return Tokenizer.from_folder(source.folder)
    except TokenizerMissing as error:
        log.warning("%s", error)
        return None


def _templates(tokenizer: Tokenizer | None) -> ChatTemplates:
    if tokenizer is None:
        return ChatTemplates({}, {})
    try:
        return ChatTemplates(tokenizer.chat_templates, tokenizer.special_tokens)
    except ModelError as error:
        log.warning("%s; messages are refused", error)
        return ChatTemplates({}, {})


def _progress_lines(check: Callable[[], None]) -> Callable[[int, int], None]:
    reported = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        check()
        if total and done / total >= reported + REPORT_STEP:
            reported = done / total
            log.info("loading weights: %d %% of %s", int(100 * reported), format_size(total))

    return progress


def _log_start(services: Services) -> None:
    info, settings = services.info, services.settings
    layers = ",".join(map(str, services.default_layers))
    log.info("model %s (revision %s): %s", services.identity.name, services.identity.revision, info.model.architecture)
    log.info("device %s, dtype %s, context of %d tokens", info.device, info.dtype, info.max_model_len)
    log.info("attention %s: %s", info.attention, info.attention_reason)
    log.info("CUDA graphs: %s", info.cuda_graphs)
    log.info("native kernels: %s", info.native_kernels)
    log.info("packed weights: %s", info.packed_weights)
    log.info("self-check: %s", info.self_check)
    log.info("default layers %s of %d, hidden size %d", layers, info.model.num_layers, info.model.hidden_size)
    log.info(
        "the KV cache holds %d tokens in blocks of %d, the state cache %d rows in pages of %d, a step at most %d tokens",
        info.kv_cache_tokens,
        info.block_size,
        info.state_cache_rows,
        info.state_page_size,
        info.max_batch_tokens,
    )
    for group in info.cache_groups:
        log.info(
            "cache of %s (layers: %d): %d blocks of %d tokens, %s each; padding wastes %d bytes",
            group.kind,
            group.num_layers,
            group.num_blocks,
            group.block_size,
            format_size(group.bytes_per_block),
            group.wasted_bytes,
        )
    log.info("attention's own buffers can grow to %s", format_size(info.attention_workspace_bytes))
    log.info("save roots: %s; durability %s", ", ".join(root.path for root in services.roots.roots), settings.durability)
