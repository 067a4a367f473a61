"""Live saves without an engine, and what their group works with, one step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from engine.errors import SaveError
from engine.saves.spec import SavedFile, SaveEvent, SaveSpec, SaveTarget
from service.registry.records import GroupMode, GroupRecord, SaveRecord
from service.saves.groups import SaveGroup
from service.saves.life import LiveSave

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Mapping, Sequence

    from service.registry.records import SaveStatus

FILE = SavedFile((3, 2, 8), num_tokens=3, bytes=100, device=1, inode=2, checksum="sha256:00")


def live_save(number: int = 0, **changes: Any) -> LiveSave:  # noqa: ANN401 - fields of LiveSave
    record = SaveRecord(f"{number:032x}", f"/saves/{number}", "request", "model", (1, 2), "float32", created=1.0, choice=number)
    spec = SaveSpec(record.id, cast("SaveTarget", None), (1, 2), "float32")
    return replace(LiveSave(record, spec, f"/client/{number}"), **changes)


def event(save: LiveSave, status: str, **changes: Any) -> SaveEvent:  # noqa: ANN401 - fields of SaveEvent
    file = FILE if status == "completed" else None
    error = SaveError("no_space", "the disk is full") if status == "failed" else None
    error = SaveError("cancelled", "the request was aborted") if status == "cancelled" else error
    return replace(SaveEvent(save.id, cast("Any", status), file, error), **changes)


class Step:
    """What a group waits for, until the test says what comes of it."""

    def __init__(self, kind: str, ids: Sequence[str], changes: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.kind, self.ids, self.changes = kind, list(ids), changes or {}
        self.result: Any = None

    def __await__(self) -> Generator[Step, None, Any]:
        yield self
        return self.result


@dataclass
class FakeOwner:
    """Commits and removals happen when the test says so. `registry` and `files` are what a client would see."""

    records: dict[str, SaveRecord] = field(default_factory=dict)
    registry: dict[str, SaveStatus] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    progress: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    pending: list[tuple[Coroutine[Any, Any, None], Step]] = field(default_factory=list)

    def record_progress(self, save: LiveSave, **changes: Any) -> None:  # noqa: ANN401 - fields of SaveRecord
        self.progress.append((save.id, changes))
        self.registry[save.id] = changes.get("status", self.registry.get(save.id, "queued"))

    async def commit(self, changes: Mapping[str, Mapping[str, Any]]) -> Sequence[SaveRecord] | None:
        committed: Sequence[SaveRecord] | None = await Step("commit", list(changes), changes)
        return committed

    async def remove_file(self, save: LiveSave) -> None:
        await Step("remove", [save.id])

    def abort(self, save: LiveSave) -> None:
        self.aborted.append(save.id)

    def start(self, work: Coroutine[Any, Any, None]) -> object:
        self.pending.append((work, work.send(None)))
        return None

    def save_ended(self, save: LiveSave) -> None:
        self.ended.append(save.id)

    def finish(self, index: int = 0, *, well: bool = True) -> Step:
        """Lets one piece of work go on to its end."""
        work, step = self.pending.pop(index)
        if step.kind == "remove":
            self.files.discard(step.ids[0])
        elif well:
            step.result = [replace(self.records[save_id], **changes) for save_id, changes in step.changes.items()]
            self.registry.update((record.id, record.status) for record in step.result)
        try:
            work.send(None)
        except StopIteration:
            return step
        raise AssertionError("the work waits for a second thing")

    def finish_all(self, *, well: bool = True) -> None:
        while self.pending:
            self.finish(well=well)


def make_group(num_saves: int, mode: GroupMode, *, awaits_text: bool = False) -> tuple[SaveGroup, FakeOwner]:
    owner = FakeOwner()
    saves = [live_save(number, awaits_text=awaits_text) for number in range(num_saves)]
    owner.records = {save.id: save.record for save in saves}
    owner.registry = {save.id: "queued" for save in saves}
    return SaveGroup(GroupRecord("group", num_saves, mode), saves, owner), owner


def publish(group: SaveGroup, owner: FakeOwner, save: LiveSave) -> None:
    owner.files.add(save.id)
    group.on_save_event(event(save, "completed"))
