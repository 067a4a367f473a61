"""Records are kept as promised: acknowledged means committed, statuses only go forward, one service per state directory."""

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import Durability
from engine.errors import ConfigError
from service.errors import NotFound, ServiceError, Unavailable
from service.registry.database import DATABASE, MIGRATIONS
from service.registry.records import ENDED, GroupMode, GroupRecord, IdempotencyKeyTaken, SaveRecord, SaveStatus, StoredGroup
from service.registry.registry import Registry

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def registry(state: Path) -> Iterator[Registry]:
    opened = Registry(state)
    yield opened
    opened.close()


def record(number: int = 0, **changes: Any) -> SaveRecord:  # noqa: ANN401 - fields of SaveRecord
    plain = SaveRecord(
        id=f"{number:032x}",
        hidden_states_path=f"/saves/{number}.safetensors",
        request_id=f"request-{number}",
        model="model",
        layers=(2, 15, "norm"),
        dtype="bfloat16",
        created=1000.0 + number,
    )
    return replace(plain, **changes)


def ids(records: list[SaveRecord]) -> list[int]:
    return [int(found.id, 16) for found in records]


FULL = record(
    7,
    status="completed",
    shape=(812, 3, 576),
    num_tokens=812,
    bytes=3741696,
    checksum="sha256:00",
    finished=2000.5,
    ttl_seconds=60.0,
    expires=2060.5,
    error_code="none",
    error_message="naïve text",
    device=2**64 - 1,
    inode=2**63 + 5,
    owner="key",
    choice=1,
    output={"text": "数\ud800", "token_ids": [1, 2], "finish_reason": "stop"},
    cached_tokens=32,
    gone=2050.5,
)


def test_every_field_comes_back_as_it_was_stored(registry: Registry) -> None:
    assert all(getattr(FULL, field.name) not in (None, field.default) for field in fields(SaveRecord))
    registry.insert(FULL).result()
    assert registry.get(FULL.id).result() == FULL
    registry.insert(record(1)).result()
    assert registry.get(record(1).id).result() == record(1)


def test_records_survive_a_restart(state: Path) -> None:
    first = Registry(state)
    first.insert(record(1), record(2)).result()
    first.update(record(1).id, status="completed", shape=[1, 2, 3], bytes=5, finished=9.0).result()
    first.close()
    second = Registry(state)
    assert second.get(record(1).id).result() == record(1, status="completed", shape=(1, 2, 3), bytes=5, finished=9.0)
    assert second.unfinished().result() == [record(2)]
    second.close()


def test_closing_commits_what_was_asked_for(state: Path) -> None:
    first = Registry(state)
    for number in range(200):
        first.insert(record(number))
    first.close()
    second = Registry(state)
    assert len(second.unfinished().result()) == 200
    second.close()


ORDER: list[SaveStatus] = ["queued", "running", "writing", "completed", "failed", "cancelled", "expired"]
REACHABLE: dict[SaveStatus, set[SaveStatus]] = {
    "queued": set(ORDER[1:]),
    "running": set(ORDER[2:]),
    "writing": set(ORDER[3:]),
    "completed": {"expired"},
    "failed": set(),
    "cancelled": set(),
    "expired": set(),
}


@pytest.mark.parametrize("old", ORDER)
@pytest.mark.parametrize("new", ORDER)
def test_a_status_only_goes_forward_and_late_events_change_nothing(registry: Registry, old: SaveStatus, new: SaveStatus) -> None:
    before = record(1, status=old, finished=5.0 if old in ENDED else None)
    registry.insert(before).result()
    answer = registry.update(before.id, status=new, error_code="late", finished=6.0).result()
    stored = registry.get(before.id).result()
    assert stored is not None
    if new in REACHABLE[old]:
        assert (stored.status, stored.error_code) == (new, "late")
        assert answer == stored
    else:
        assert answer is None
        assert stored == before


def test_a_field_can_be_added_after_the_end(registry: Registry) -> None:
    registry.insert(record(1)).result()
    registry.update(record(1).id, status="completed", finished=5.0).result()
    registry.update(record(1).id, output={"text": "late"}).result()
    stored = registry.get(record(1).id).result()
    assert stored is not None
    assert (stored.status, stored.finished, stored.output) == ("completed", 5.0, {"text": "late"})


def test_what_completes_gets_its_time_and_its_date_of_expiry(registry: Registry) -> None:
    registry.insert(record(1, ttl_seconds=60.0), record(2, ttl_seconds=60.0)).result()
    before = time.time()
    completed = registry.update(record(1).id, status="completed").result()
    failed = registry.update(record(2).id, status="failed").result()
    assert completed is not None
    assert completed.finished is not None
    assert before <= completed.finished <= time.time()
    assert completed.expires == completed.finished + 60.0
    assert failed is not None
    assert failed.expires is None


def test_an_unknown_record_is_nobody(registry: Registry) -> None:
    assert registry.get("missing").result() is None
    assert registry.update("missing", status="running").result() is None
    assert registry.delete("missing").result() is False
    assert registry.ended("missing").result() is None


def test_an_operation_that_fails_fails_alone(registry: Registry, state: Path) -> None:
    registry.insert(record(1)).result()
    blocker = sqlite3.connect(state / DATABASE, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")  # So that all that follows gathers for one transaction.
    first = registry.insert(record(2))
    futures = [registry.insert(record(3)), registry.insert(record(4), record(1)), registry.insert(record(5, output={"x": object()}))]
    last = registry.insert(record(6))
    blocker.execute("ROLLBACK")
    blocker.close()
    first.result()
    futures[0].result()
    with pytest.raises(ServiceError) as refused:
        futures[1].result()
    assert refused.value.status == 500
    with pytest.raises(TypeError):
        futures[2].result()
    last.result()
    assert ids(registry.list().result()) == [6, 3, 2, 1]


def test_a_burst_of_changes_is_committed_in_few_transactions(registry: Registry, state: Path) -> None:
    blocker = sqlite3.connect(state / DATABASE, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(8) as pool:
        futures = list(pool.map(lambda number: registry.insert(record(number)), range(400)))
    assert not any(future.done() for future in futures)
    blocker.execute("ROLLBACK")
    blocker.close()
    for future in futures:
        future.result()
    assert registry.commits <= 2
    assert len(registry.unfinished().result()) == 400


def test_a_change_is_acknowledged_only_once_another_connection_sees_it(registry: Registry, state: Path) -> None:
    reader = sqlite3.connect(state / DATABASE, isolation_level=None)
    for number in range(50):
        registry.insert(record(number)).result()
        assert reader.execute("SELECT count(*) FROM saves").fetchone()[0] == number + 1
    reader.close()


def test_lists_are_newest_first_and_filtered(registry: Registry) -> None:
    registry.insert(
        record(1, hidden_states_path="/saves/a/1", request_id="r", owner="one"),
        record(2, hidden_states_path="/saves/a/2", status="completed", owner="two"),
        record(3, hidden_states_path="/saves/A/3", request_id="r", owner="one"),
        record(4, hidden_states_path="/saves/a%/4", status="completed", owner="one"),
        record(5, hidden_states_path="/saves/a\U0010fffd/5"),
    ).result()
    assert ids(registry.list().result()) == [5, 4, 3, 2, 1]
    assert ids(registry.list(status="completed").result()) == [4, 2]
    assert ids(registry.list(request_id="r").result()) == [3, 1]
    assert ids(registry.list(owner="one").result()) == [4, 3, 1]
    assert ids(registry.list(owner="one", status="completed").result()) == [4]
    assert ids(registry.list(prefix="/saves/a").result()) == [5, 4, 2, 1]
    assert ids(registry.list(prefix="/saves/a/").result()) == [2, 1]
    assert ids(registry.list(prefix="/saves/a%").result()) == [4]
    assert ids(registry.list(limit=2).result()) == [5, 4]


def test_pages_go_on_behind_a_record_that_was_deleted_meanwhile(registry: Registry) -> None:
    registry.insert(*(record(number) for number in range(7))).result()
    seen: list[int] = []
    after: str | None = None
    while page := registry.list(limit=3, after=after).result():
        seen += ids(page)
        after = page[-1].id
        for found in page:
            assert registry.delete(found.id).result() is True
            assert registry.delete(found.id).result() is False
    assert seen == [6, 5, 4, 3, 2, 1, 0]
    with pytest.raises(NotFound):
        registry.list(after="unknown").result()


def group(number: int = 0, **changes: Any) -> GroupRecord:  # noqa: ANN401 - fields of GroupRecord
    return replace(GroupRecord(f"group-{number}", size=2), **changes)


def pair(number: int) -> list[SaveRecord]:
    return [record(number, choice=0), record(number + 1, choice=1)]


@pytest.mark.parametrize("mode", ["all_or_nothing", "independent"])
def test_a_group_comes_back_with_its_records_by_choice(registry: Registry, mode: GroupMode) -> None:
    made, saves = group(mode=mode, owner="one", idempotency_key="k", body_hash="h"), pair(1)
    registry.insert(*saves[::-1], group=made).result()
    stored = StoredGroup(made, tuple(saves))
    assert registry.get_group(made.id).result() == stored
    assert registry.find_group("one", "k").result() == stored
    assert [registry.group_of(save.id).result() for save in saves] == [stored, stored]
    assert stored.whole


def test_there_is_no_group_of_what_is_not_there(registry: Registry) -> None:
    registry.insert(*pair(1), group=group()).result()
    assert registry.get_group("missing").result() is None
    assert registry.group_of("missing").result() is None
    assert registry.find_group(None, "missing").result() is None


def test_records_that_nobody_has_grouped_are_each_alone(registry: Registry) -> None:
    registry.insert(record(1, owner="one"), record(2)).result()
    stored = registry.group_of(record(1).id).result()
    assert stored == StoredGroup(GroupRecord(record(1).id, size=1, owner="one"), (record(1, owner="one"),))


def test_a_group_lives_as_long_as_one_of_its_records(registry: Registry) -> None:
    registry.insert(*pair(1), group=group(idempotency_key="k")).result()
    registry.delete(record(1).id).result()
    stored = registry.find_group(None, "k").result()
    assert stored is not None
    assert (stored.saves, stored.whole) == ((record(2, choice=1),), False)
    registry.delete(record(2).id).result()
    assert registry.find_group(None, "k").result() is None
    assert registry.get_group(group().id).result() is None


def test_purged_records_take_their_group_along(state: Path) -> None:
    registry = Registry(state, keep_seconds=100)
    ended = [replace(save, status="failed", finished=10.0) for save in pair(1)]
    registry.insert(*ended, group=group(idempotency_key="k")).result()
    assert registry.purge(now=1000.0).result() == 2
    assert registry.find_group(None, "k").result() is None
    registry.close()


def test_an_idempotency_key_stands_for_one_request_of_its_owner(registry: Registry) -> None:
    registry.insert(*pair(1), group=group(1, idempotency_key="k", body_hash="h")).result()
    with pytest.raises(IdempotencyKeyTaken) as taken:
        registry.insert(record(3), group=group(2, size=1, idempotency_key="k", body_hash="other")).result()
    assert (taken.value.status, taken.value.code) == (409, "idempotency_key_taken")
    assert registry.get(record(3).id).result() is None
    registry.insert(record(4), group=group(3, size=1, owner="somebody", idempotency_key="k")).result()
    found = [registry.find_group(owner, "k").result() for owner in (None, "somebody", "nobody")]
    assert [None if stored is None else stored.group.id for stored in found] == ["group-1", "group-3", None]
    for save in pair(1):
        registry.delete(save.id).result()
    registry.insert(record(5), group=group(4, size=1, idempotency_key="k")).result()


def test_a_key_that_was_released_can_be_used_again_and_the_records_stay(registry: Registry) -> None:
    registry.insert(*pair(1), group=group(1, idempotency_key="k")).result()
    registry.release_key("group-1").result()
    assert registry.find_group(None, "k").result() is None
    assert len(registry.list().result()) == 2
    registry.insert(record(5), group=group(2, size=1, idempotency_key="k")).result()
    stored = registry.find_group(None, "k").result()
    assert stored is not None
    assert stored.group.id == "group-2"


def test_of_many_requests_with_one_key_exactly_one_is_inserted(registry: Registry) -> None:
    def insert(number: int) -> Any:  # noqa: ANN401 - a future
        return registry.insert(record(number), group=group(number, size=1, idempotency_key="k"))

    with ThreadPoolExecutor(8) as pool:
        futures = list(pool.map(insert, range(32)))
    errors = [future.exception() for future in futures]
    assert sum(error is None for error in errors) == 1
    assert all(error is None or isinstance(error, IdempotencyKeyTaken) for error in errors)


def test_the_groups_of_unfinished_records_are_listed_once_each_and_oldest_first(registry: Registry) -> None:
    registry.insert(*pair(1), group=group(1)).result()
    registry.insert(record(3, status="completed"), record(4, choice=1, status="running"), group=group(2)).result()
    registry.insert(record(5, status="failed"), group=group(3, size=1)).result()
    registry.insert(record(6, status="writing"), group=group(0, size=1)).result()
    assert registry.unfinished_groups().result() == ["group-1", "group-2", "group-0"]


# Ends.

COMPLETE = {"status": "completed", "bytes": 5, "finished": 9.0}


def test_records_end_together_in_one_transaction(registry: Registry) -> None:
    registry.insert(*pair(1), group=group()).result()
    commits = registry.commits
    ended = registry.end({save.id: COMPLETE | {"num_tokens": save.choice} for save in pair(1)}).result()
    assert registry.commits == commits + 1
    assert ended == [registry.get(save.id).result() for save in pair(1)]
    assert [(save.status, save.bytes, save.num_tokens, save.finished) for save in ended] == [
        ("completed", 5, 0, 9.0),
        ("completed", 5, 1, 9.0),
    ]


@pytest.mark.parametrize("other", ["failed", "cancelled", "expired", None])
def test_where_one_record_can_not_end_so_none_does(registry: Registry, other: SaveStatus | None) -> None:
    registry.insert(record(1), record(2, choice=1), group=group()).result()
    if other is None:
        registry.delete(record(2).id).result()
    else:
        registry.update(record(2).id, status=other).result()
    assert registry.end({record(1).id: COMPLETE, record(2).id: COMPLETE}).result() is None
    assert registry.get(record(1).id).result() == record(1)


def test_an_end_that_had_been_committed_already_is_told_again_and_changes_nothing(registry: Registry) -> None:
    registry.insert(*pair(1), group=group()).result()
    first = registry.end({save.id: COMPLETE for save in pair(1)}).result()
    assert registry.end({save.id: COMPLETE | {"bytes": 7} for save in pair(1)}).result() == first
    assert registry.used_bytes().result() == 10


def test_whoever_waits_for_a_record_hears_of_an_end_that_is_committed_with_others(registry: Registry) -> None:
    registry.insert(*pair(1), group=group()).result()
    waiting = registry.ended(record(2).id)
    registry.end({save.id: COMPLETE for save in pair(1)}).result()
    heard = waiting.result()
    assert heard is not None
    assert (heard.id, heard.status) == (record(2).id, "completed")


def test_an_end_of_nothing_that_is_known_is_none(registry: Registry) -> None:
    assert registry.end({"missing": COMPLETE}).result() is None


def test_a_registry_that_stays_locked_closes_after_one_more_attempt(state: Path) -> None:
    registry = Registry(state, busy_seconds=0.05)
    blocker = sqlite3.connect(state / DATABASE, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    entered, go_on = threading.Event(), threading.Event()

    def hold(_: sqlite3.Connection) -> None:
        entered.set()
        go_on.wait()

    registry._thread.submit(hold)
    entered.wait()
    futures = [registry.insert(record(number)) for number in range(1000)]  # Two transactions.
    closing = threading.Thread(target=registry.close)
    closing.start()
    while not registry._thread._closed:
        pass
    go_on.set()
    closing.join()
    blocker.close()
    errors = [future.exception() for future in futures]
    assert [getattr(error, "status", None) for error in errors] == [500] * 512 + [503] * 488
    assert registry.commits == 0


def test_old_and_surplus_records_are_purged_but_not_what_still_matters(state: Path) -> None:
    registry = Registry(state, keep_seconds=100, keep_count=5)
    registry.insert(
        record(1, status="completed", finished=10.0),
        record(2, status="completed", finished=10.0, expires=5000.0),
        record(3, status="running"),
        record(4, status="failed", finished=950.0),
        record(5, status="completed", finished=950.0),
        record(6, status="completed", finished=940.0),
        record(7),
        record(8, status="expired", finished=10.0),
    ).result()
    assert registry.purge(now=1000.0).result() == 3
    assert ids(registry.list().result()) == [7, 6, 5, 3, 2]
    assert registry.purge(now=1000.0).result() == 0
    assert registry.purge(now=2000.0, limit=1).result() == 1
    assert ids(registry.list().result()) == [7, 5, 3, 2]
    registry.close()


def test_a_deleted_record_is_a_place_in_lists_until_it_would_have_been_purged(state: Path) -> None:
    registry = Registry(state, keep_seconds=100)
    registry.insert(record(1), record(2)).result()
    registry.delete(record(2).id).result()
    registry.purge(now=time.time()).result()
    assert ids(registry.list(after=record(2).id).result()) == [1]
    registry.purge(now=time.time() + 200).result()
    with pytest.raises(NotFound):
        registry.list(after=record(2).id).result()
    registry.close()


def test_no_more_records_are_purged_at_once_than_asked(state: Path) -> None:
    registry = Registry(state, keep_seconds=100, keep_count=1)
    registry.insert(*(record(number, status="failed", finished=10.0 if number < 4 else 950.0) for number in range(8))).result()
    assert registry.purge(now=1000.0, limit=5).result() == 5
    assert ids(registry.list().result()) == [7, 6, 5]
    assert registry.purge(now=1000.0, limit=5).result() == 2
    registry.close()


def test_waiting_ends_with_the_save(registry: Registry) -> None:
    async def scenario() -> tuple[SaveRecord | None, SaveRecord | None, SaveRecord | None]:
        waiting = asyncio.ensure_future(registry.wait(record(1).id, 60))
        early = await registry.wait(record(1).id, 0.01)
        registry.update(record(1).id, status="running")
        registry.update(record(1).id, status="completed", bytes=5)
        ended = await waiting
        return early, ended, await registry.wait(record(1).id, 60)

    registry.insert(record(1)).result()
    early, ended, again = asyncio.run(scenario())
    assert early is not None
    assert early.status == "queued"
    assert ended is not None
    assert (ended.status, ended.bytes) == ("completed", 5)
    assert again == ended


def test_waiting_ends_when_the_record_is_deleted_or_the_registry_closed(state: Path) -> None:
    registry = Registry(state)
    registry.insert(record(1), record(2)).result()
    deleted, closed = registry.ended(record(1).id), registry.ended(record(2).id)
    registry.delete(record(1).id).result()
    assert deleted.result() is None
    registry.close()
    with pytest.raises(Unavailable):
        closed.result()
    with pytest.raises(Unavailable):
        registry.get(record(1).id).result()
    registry.close()


def test_a_waiter_that_gave_up_harms_nobody(registry: Registry) -> None:
    registry.insert(record(1)).result()
    first, second = registry.ended(record(1).id), registry.ended(record(1).id)
    assert first.cancel()
    registry.update(record(1).id, status="failed").result()
    ended = second.result()
    assert ended is not None
    assert ended.status == "failed"


def test_many_threads_see_their_own_changes(registry: Registry) -> None:
    def run(number: int) -> bool:
        registry.insert(record(number)).result()
        for status in ("running", "writing", "completed"):
            registry.update(record(number).id, status=status)
        stored = registry.get(record(number).id).result()
        return stored is not None and stored.status == "completed"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(100)))


def test_a_second_service_is_refused_with_one_line_until_the_first_has_closed(state: Path) -> None:
    first = Registry(state)
    with pytest.raises(ConfigError, match="in use by another service") as refused:
        Registry(state)
    assert str(state) in str(refused.value)
    assert "\n" not in str(refused.value)
    first.close()
    Registry(state).close()


@pytest.mark.parametrize("kind", ["garbage", "torn"])
def test_a_damaged_registry_is_refused_with_one_line(state: Path, kind: str) -> None:
    registry = Registry(state)
    for number in range(200):
        registry.insert(record(number))
    registry.close()
    content = (state / DATABASE).read_bytes()
    torn = content[:8192] + b"\xff" * 8192 + content[16384:]
    (state / DATABASE).write_bytes(b"not a database, " * 1000 if kind == "garbage" else torn)
    with pytest.raises(ConfigError, match="damaged") as refused:
        Registry(state)
    assert "\n" not in str(refused.value)
    (state / DATABASE).unlink()
    Registry(state).close()


def test_a_registry_that_another_process_has_locked_is_refused(state: Path) -> None:
    Registry(state).close()
    blocker = sqlite3.connect(state / DATABASE, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(ConfigError, match="locked by another process"):
        Registry(state, busy_seconds=0.05)
    blocker.execute("ROLLBACK")
    blocker.close()
    Registry(state).close()


def test_a_registry_of_a_newer_version_is_refused_and_left_alone(state: Path) -> None:
    Registry(state).close()
    newer = sqlite3.connect(state / DATABASE)
    newer.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    newer.close()
    content = (state / DATABASE).read_bytes()
    with pytest.raises(ConfigError, match="newer version"):
        Registry(state)
    assert (state / DATABASE).read_bytes() == content


def test_an_older_schema_is_brought_up_to_date_with_its_records(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Registry(state)
    old.insert(record(1)).result()
    old.close()
    monkeypatch.setattr("service.registry.database.MIGRATIONS", (*MIGRATIONS, ("ALTER TABLE saves ADD COLUMN extra TEXT DEFAULT 'new'",)))
    new = Registry(state)
    assert new.get(record(1).id).result() == record(1)
    new.close()
    reader = sqlite3.connect(state / DATABASE)
    assert reader.execute("SELECT extra FROM saves").fetchall() == [("new",)]
    assert reader.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
    reader.close()


def test_a_migration_that_fails_leaves_the_registry_as_it_was(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Registry(state).close()
    with monkeypatch.context() as patch:
        patch.setattr("service.registry.database.MIGRATIONS", (*MIGRATIONS, ("ALTER TABLE saves ADD COLUMN extra", "NONSENSE")))
        with pytest.raises(ConfigError):
            Registry(state)
    registry = Registry(state)
    registry.insert(record(1)).result()
    registry.close()


@pytest.mark.parametrize(("durability", "synchronous"), [("none", 1), ("file", 1), ("full", 2)])
def test_commits_are_synced_where_files_are_promised_to_survive_a_power_cut(
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    durability: Durability,
    synchronous: int,
) -> None:
    seen: list[tuple[str, int]] = []

    class Spy(Registry):
        def pragmas(self) -> None:
            seen.append(
                self._thread.submit(
                    lambda database: tuple(database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous"))
                ).result()
            )

    registry = Spy(state, durability=durability)
    registry.pragmas()
    registry.close()
    assert seen == [("wal", synchronous)]


def test_a_state_directory_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--state-dir"):
        Registry(tmp_path / "file/state")


def test_a_full_disk_fails_the_changes_of_that_moment_and_the_registry_goes_on(registry: Registry) -> None:
    def limit(pages: int) -> None:
        registry._thread.submit(lambda database: database.execute(f"PRAGMA max_page_count = {pages}").fetchone()).result()

    registry.insert(record(1)).result()
    limit(1)  # Not below the present size, which SQLite keeps as the limit then.
    futures = [registry.insert(record(number, output={"text": "x" * 5000})) for number in range(2, 60)]
    errors = [future.exception() for future in futures]
    assert {getattr(error, "status", None) for error in errors} <= {None, 507}
    assert any(error is not None for error in errors)
    limit(1_000_000)
    registry.insert(record(100)).result()
    kept = {1, 100} | {number for number, error in enumerate(errors, start=2) if error is None}
    assert set(ids(registry.list(limit=1000).result())) == kept


CHILD = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from service.registry.records import SaveRecord
from service.registry.registry import Registry

registry = Registry(Path(sys.argv[2]))
mutex = threading.Lock()

def run(thread):
    for number in range(1_000_000):
        save_id = f"{thread * 1_000_000 + number:032x}"
        record = SaveRecord(save_id, "/saves/x", "r", "m", (1,), "float32", 0.0)
        registry.insert(record).result()
        registry.update(save_id, status="completed", bytes=number).result()
        with mutex:
            sys.stdout.write(f"{save_id} {number}\\n")
            sys.stdout.flush()

for thread in range(8):
    threading.Thread(target=run, args=(thread,)).start()
"""


def test_what_was_acknowledged_is_there_after_a_kill_in_the_middle_of_writes(state: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD, str(REPOSITORY), str(state)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(500)]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
    acknowledged = dict(line.split() for line in lines if line.endswith("\n"))
    assert len(acknowledged) >= 500
    registry = Registry(state)
    for save_id, number in acknowledged.items():
        stored = registry.get(save_id).result()
        assert stored is not None
        assert (stored.status, stored.bytes) == ("completed", int(number))
    registry.close()


def test_the_registry_thread_ends_with_it(state: Path) -> None:
    before = set(threading.enumerate())
    Registry(state).close()
    assert set(threading.enumerate()) == before


def test_the_bytes_in_use_are_those_of_completed_files_that_are_there(registry: Registry) -> None:
    def used() -> int:
        return registry.used_bytes().result()

    registry.insert(record(1), record(2), record(3, status="completed", bytes=1000)).result()
    assert used() == 1000
    registry.update(record(1).id, status="completed", bytes=10).result()
    registry.update(record(2).id, status="failed").result()
    assert used() == 1010
    registry.update(record(1).id, gone=5.0).result()
    registry.update(record(1).id, gone=6.0).result()
    assert used() == 1000
    registry.update(record(1).id, gone=None).result()
    registry.update(record(3).id, status="expired").result()
    assert used() == 10
    registry.delete(record(3).id).result()
    registry.delete(record(1).id).result()
    assert used() == 0


def test_outputs_count_as_files_do_for_as_long_as_their_record_stands(registry: Registry) -> None:
    def used() -> int:
        return registry.used_bytes().result()

    output = {"text": "é" * 10, "token_ids": [1, 2], "finish_reason": "stop"}
    size = len(json.dumps(output, separators=(",", ":")).encode())
    registry.insert(record(1, output={}), record(2, output=output, status="completed", bytes=1000)).result()
    assert used() == 1000 + size + len("{}")
    registry.update(record(1).id, output=output).result()
    registry.update(record(1).id, status="completed", bytes=10).result()
    assert used() == 1010 + 2 * size
    registry.update(record(2).id, status="expired").result()
    assert used() == 10 + 2 * size
    registry.delete(record(2).id).result()
    registry.delete(record(1).id).result()
    assert used() == 0


def test_lists_and_looks_at_many_files_read_no_outputs(registry: Registry) -> None:
    output = {"text": "a", "token_ids": [1], "finish_reason": "stop"}
    registry.insert(record(1, status="completed", output=output, expires=1.0)).result()
    for found in (registry.list().result(), registry.expired(2.0, 0, 9).result(), registry.completed(0, 9).result()[0]):
        assert [each.output for each in found] == [None]
    kept = registry.get(record(1).id).result()
    assert kept is not None
    assert kept.output == output


def test_the_bytes_in_use_survive_purges_restarts_and_operations_that_fail(state: Path) -> None:
    first = Registry(state, keep_seconds=100)
    first.insert(*(record(number, status="completed", bytes=2**number, finished=1000.0 * number) for number in range(40))).result()
    with pytest.raises(ServiceError):
        first.insert(record(50, status="completed", bytes=7), record(1)).result()
    assert first.used_bytes().result() == 2**40 - 1
    first.purge(20_100.0).result()
    assert first.used_bytes().result() == 2**40 - 2**20
    first.close()
    second = Registry(state)
    assert second.used_bytes().result() == 2**40 - 2**20
    second.close()


def test_expired_and_completed_records_are_listed_in_pages(registry: Registry) -> None:
    registry.insert(*(record(number, status="completed", expires=10.0 * (9 - number)) for number in range(9))).result()
    registry.insert(record(20, status="completed"), record(21), record(22, status="expired", expires=1.0)).result()
    assert ids(registry.expired(50.0, 0, 3).result()) == [8, 7, 6]
    assert ids(registry.expired(50.0, 3, 3).result()) == [5, 4]
    page, after = registry.completed(0, 6).result()
    rest, after = registry.completed(after, 6).result()
    assert ids(page) + ids(rest) == [*range(9), 20]
    assert registry.completed(after, 6).result() == ([], after)


def test_files_of_an_older_schema_are_counted(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.mkdir()
    with sqlite3.connect(state / DATABASE) as old:
        for statement in MIGRATIONS[0]:
            old.execute(statement)
        columns = "id, status, hidden_states_path, request_id, model, layers, dtype, created, choice, bytes"
        for number, status in enumerate(("completed", "completed", "failed")):
            old.execute(f"INSERT INTO saves ({columns}) VALUES (?, ?, '/x', 'r', 'm', '[]', 'float32', 1.0, 0, 100)", [f"{number}", status])
        old.execute("PRAGMA user_version = 1")
    old.close()
    opened = Registry(state)
    assert opened.used_bytes().result() == 200
    opened.close()


def test_requests_of_an_older_schema_are_groups_by_their_keys(state: Path) -> None:
    state.mkdir()
    columns = "id, status, owner, idempotency_key, body_hash, choice, hidden_states_path, request_id, model, layers, dtype, created"
    rows = [
        ("a0", "completed", "one", "k", "h", 0),
        ("a1", "writing", "one", "k", "h", 1),
        ("b0", "completed", "two", "k", "other", 0),
        ("c0", "failed", None, "k", "third", 0),
        ("d2", "completed", None, "lost", "h", 2),  # The others were deleted.
        ("e0", "running", None, None, None, 0),
        ("e1", "running", None, None, None, 1),
    ]
    with sqlite3.connect(state / DATABASE) as old:
        for migration in MIGRATIONS[:3]:
            for statement in migration:
                old.execute(statement)
        for row in rows:
            old.execute(f"INSERT INTO saves ({columns}) VALUES (?, ?, ?, ?, ?, ?, '/x', 'r', 'm', '[]', 'float32', 1.0)", row)
        old.execute("PRAGMA user_version = 3")
    old.close()
    opened = Registry(state)

    def found(owner: str | None, key: str) -> tuple[list[str], int, str | None, str]:
        stored = opened.find_group(owner, key).result()
        assert stored is not None
        return [save.id for save in stored.saves], stored.group.size, stored.group.body_hash, stored.group.mode

    assert found("one", "k") == (["a0", "a1"], 2, "h", "independent")
    assert found("two", "k") == (["b0"], 1, "other", "independent")
    assert found(None, "k") == (["c0"], 1, "third", "independent")
    assert found(None, "lost") == (["d2"], 3, "h", "independent")
    alone = [opened.group_of(save_id).result() for save_id in ("e0", "e1")]
    assert [None if stored is None else (stored.group.size, len(stored.saves)) for stored in alone] == [(1, 1), (1, 1)]
    assert len(opened.unfinished_groups().result()) == 3
    assert ids_of(opened.list().result()) == [row[0] for row in reversed(rows)]
    with pytest.raises(IdempotencyKeyTaken):
        opened.insert(record(1), group=group(owner="one", idempotency_key="k")).result()
    opened.close()
    Registry(state).close()


def ids_of(records: list[SaveRecord]) -> list[str]:
    return [found.id for found in records]
