"""What routes work with once the engine runs: made at start, passed down, never replaced."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from engine.api import EngineAPI, EngineInfo
from engine.layers import LayerId
from service.config.settings import Settings
from service.engine_events import EngineEvents
from service.observe.failures import logs_failure
from service.observe.metrics import Metrics
from service.observe.tracing import Tracing
from service.registry.records import SaveRecord
from service.registry.registry import Registry
from service.saves.deletion import Deleter
from service.saves.paths.roots import SaveRoots
from service.saves.saver import Saver
from service.saves.space import Space
from service.saves.targets import Targets
from service.shares import Shares
from service.text.chat_templates import ChatTemplates
from service.text.prompts import Limits, PromptMaker
from service.text.tokenizer import Tokenizer
from service.threads import DiskPools, Threads

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelIdentity:
    """What answers and files call the model."""

    name: str
    revision: str


@dataclass(frozen=True)
class Services:
    """The parts of a running service."""

    settings: Settings
    engine: EngineAPI
    identity: ModelIdentity
    default_layers: tuple[LayerId, ...]
    tokenizer: Tokenizer | None
    """None for a model folder without one: such a model takes token ids only."""
    templates: ChatTemplates
    registry: Registry
    roots: SaveRoots
    targets: Targets
    saver: Saver
    deleter: Deleter
    space: Space
    events: EngineEvents
    metrics: Metrics
    threads: Threads
    shares: Shares
    started: float
    """Seconds since 1970."""
    tracing: Tracing | None = None
    """None where no traces are wanted."""
    idempotent_admissions: "WeakValueDictionary[tuple[str | None, str], asyncio.Lock]" = field(default_factory=WeakValueDictionary)
    """Looking an owner's key up and inserting it are one step."""
    background: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def limits(self) -> Limits:
        return Limits(self.info.model.vocab_size, self.info.max_model_len)

    @property
    def prompt_maker(self) -> PromptMaker:
        return PromptMaker(self.tokenizer, self.templates, self.limits)

    def disk_of(self, record: SaveRecord) -> DiskPools:
        """The threads for the root that a record's file is in."""
        return self.threads.disk(self.roots.root_of(record.hidden_states_path))

    def idempotent_admission(self, owner: str | None, key: str) -> asyncio.Lock:
        """The same lock for all callers while any of them holds it."""
        return self.idempotent_admissions.setdefault((owner, key), asyncio.Lock())

    def start_in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Runs something that no answer waits for; what goes wrong in it is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self.keep(task)
        task.add_done_callback(logs_failure(log, "a request in the background failed"))
        return task

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Holds a task until it has ended: the event loop itself doesn't. The service's end waits for it."""
        self.background.add(task)
        task.add_done_callback(self.background.discard)
