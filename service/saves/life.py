"""The life of one save: its states, and which signal takes it from one to the next.

Two things move a save: what the engine says of its rows and its file, and what its group decides (`service/saves/groups.py`). A signal
that has no place in a state comes late and is ignored, so every save ends: `ABORTING`, `COMPLETING`, `REMOVING` and `ENDING` each wait for
one thing that always comes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from engine.errors import SaveError
from engine.saves.spec import SavedFile, SaveSpec
from service.registry.records import SaveRecord, SaveStatus
from service.saves.published import file_fields


class SaveState(Enum):
    """Where a save is. Clients see the status of its record, which is coarser."""

    QUEUED = "waits for the engine"
    RUNNING = "its rows are being computed"
    WRITING = "all rows are computed, some are still written"
    ABORTING = "the engine is to end it, and may have published its file by now"
    PUBLISHED = "its file stands; it completes with its text and, all or nothing, with the other saves of its group"
    COMPLETING = "the commit of `completed` is under way"
    REMOVING = "its file is being taken back"
    ENDING = "the commit of `failed` or `cancelled` is under way"
    COMPLETED = "ended, with a file"
    DISCARDED = "ended, without a file"


class Signal(Enum):
    """What moves a save on."""

    STARTED = "the engine computes it"
    COMPUTED = "the engine has computed all rows"
    PUBLISHED = "the engine has published the file"
    STOPPED = "the engine has ended it without a file"
    ABORT = "it was aborted"
    COMPLETE = "nothing has to be waited for any more"
    COMMITTED = "the registry has taken the end"
    NOT_COMMITTED = "the registry could not take the end"
    REMOVED = "the file has been removed, or can't be"
    WITHDRAWN = "the request was refused after all: nothing of it is kept"


TRANSITIONS: Mapping[SaveState, Mapping[Signal, SaveState]] = {
    SaveState.QUEUED: {
        Signal.STARTED: SaveState.RUNNING,
        Signal.COMPUTED: SaveState.WRITING,
        Signal.PUBLISHED: SaveState.PUBLISHED,
        Signal.STOPPED: SaveState.ENDING,
        Signal.ABORT: SaveState.ABORTING,
        Signal.WITHDRAWN: SaveState.DISCARDED,
    },
    SaveState.RUNNING: {
        Signal.COMPUTED: SaveState.WRITING,
        Signal.PUBLISHED: SaveState.PUBLISHED,
        Signal.STOPPED: SaveState.ENDING,
        Signal.ABORT: SaveState.ABORTING,
    },
    SaveState.WRITING: {
        Signal.PUBLISHED: SaveState.PUBLISHED,
        Signal.STOPPED: SaveState.ENDING,
        Signal.ABORT: SaveState.ABORTING,
    },
    SaveState.ABORTING: {
        Signal.PUBLISHED: SaveState.REMOVING,
        Signal.STOPPED: SaveState.ENDING,
        Signal.WITHDRAWN: SaveState.DISCARDED,
    },
    SaveState.PUBLISHED: {Signal.COMPLETE: SaveState.COMPLETING, Signal.ABORT: SaveState.REMOVING},
    SaveState.COMPLETING: {Signal.COMMITTED: SaveState.COMPLETED, Signal.NOT_COMMITTED: SaveState.REMOVING},
    SaveState.REMOVING: {Signal.REMOVED: SaveState.ENDING},
    SaveState.ENDING: {Signal.COMMITTED: SaveState.DISCARDED, Signal.NOT_COMMITTED: SaveState.DISCARDED},
    SaveState.COMPLETED: {},
    SaveState.DISCARDED: {},
}
LAST: frozenset[SaveState] = frozenset(state for state, following in TRANSITIONS.items() if not following)
"""Nothing moves a save that is in one of these."""
PROGRESS: Mapping[SaveState, SaveStatus] = {SaveState.RUNNING: "running", SaveState.WRITING: "writing"}
"""States on the way whose status the record takes; the last states have theirs from the commit."""


@dataclass(frozen=True)
class Ending:
    """Why a save has no file."""

    status: Literal["failed", "cancelled"]
    error: SaveError


def _noop() -> None:
    pass


@dataclass
class LiveSave:
    """A save of this process. Its group alone moves it; others read. Used on the event loop."""

    record: SaveRecord
    """As the registry has it or is about to."""
    spec: SaveSpec
    client_path: str
    """The path as the client knows it."""
    awaits_text: bool = False
    """It completes only once the text that belongs to its file is done."""
    engine_id: str = ""
    """The request that the engine knows it by, once that has been submitted."""
    state: SaveState = SaveState.QUEUED
    file: SavedFile | None = None
    ending: Ending | None = None
    seconds: float = 0.0
    """From the last computed token to the end of the save in the engine."""
    on_change: Callable[[], None] = field(default=_noop)
    """Called when the save has moved."""
    on_end: Callable[[], None] = field(default=_noop)
    """Called once, when the save has ended."""
    times_ns: dict[SaveStatus, int] = field(default_factory=dict)
    """When the engine brought it to which status, in nanoseconds since 1970."""

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def status(self) -> SaveStatus:
        return self.record.status

    @property
    def ended(self) -> bool:
        return self.state in LAST

    @property
    def error(self) -> SaveError | None:
        """Why there is no file, or why there will be none."""
        return None if self.ending is None else self.ending.error

    def apply(self, signal: Signal) -> bool:
        """Moves on; False, and nothing has changed, where the signal comes late."""
        following = TRANSITIONS[self.state].get(signal)
        if following is None:
            return False
        self.state = following
        if following in PROGRESS:
            self.record = replace(self.record, status=PROGRESS[following])
        return True

    def can(self, signal: Signal) -> bool:
        return signal in TRANSITIONS[self.state]

    def completion(self, now: float) -> dict[str, Any]:
        """The fields of the record of a save that completes, its text included."""
        assert self.file is not None
        of_text = {"output": self.record.output, "cached_tokens": self.record.cached_tokens}
        return file_fields(self.file) | of_text | {"status": "completed", "finished": now}

    def discarding(self, now: float) -> dict[str, Any]:
        """The fields of the record of a save that ends without a file."""
        assert self.ending is not None
        error = self.ending.error
        return {"status": self.ending.status, "finished": now, "error_code": error.code, "error_message": str(error)}

    def transfer(self) -> dict[str, Any]:
        """The answer's `kv_transfer_params` object, with what is known so far."""
        known: dict[str, Any] = {
            "hidden_states_path": self.client_path,
            "save_id": self.id,
            "status": self.status,
            "layers": list(self.spec.layers),
            "dtype": self.spec.dtype,
        }
        if self.file is not None and self.status == "completed":
            known |= {"num_tokens": self.file.num_tokens, "shape": list(self.file.shape), "bytes": self.file.bytes}
            known["url"] = file_url(self.id)
        return known


def file_url(save_id: str) -> str:
    """Where the file can be downloaded, below the address of the service."""
    return f"/saves/{save_id}/file"
