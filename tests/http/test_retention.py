"""How long files and records are kept, and how much room they may take."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import xxhash
from prometheus_client.parser import text_string_to_metric_families

from service import runtime
from service.cli.main import main
from service.saves import reaper
from service.saves.reaper import Reaper
from service.saves.space import Need, Runner, Space
from tests.http.gate import PublishingGate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.http.conftest import Service, Services

PROMPT = [5] * 100
ROOM = 60_000
"""For one file of `save` and what it reserves, not for two."""


def save(service: Service, **params: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of kv_transfer_params
    transfer: dict[str, Any] = service.completed(prompt=PROMPT, max_tokens=0, kv_transfer_params=params)["kv_transfer_params"]
    return transfer


def refused(service: Service, code: str) -> dict[str, Any]:
    error = service.refused(507, prompt=PROMPT, max_tokens=0, kv_transfer_params={"hidden_states_path": "refused/x"})
    assert error["code"] == code
    return error


def metric(service: Service, name: str) -> list[float]:
    families = text_string_to_metric_families(service.client.get("/metrics").text)
    return [sample.value for family in families for sample in family.samples if sample.name == name]


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def has_status(service: Service, save_id: str, status: str) -> bool:
    return bool(service.record(save_id, wait=0)["status"] == status)


@dataclass
class Clock:
    """What services take for the time, which the test moves on."""

    ahead_seconds: float = 0.0

    def now(self) -> float:
        return time.time() + self.ahead_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of services whose reaper looks around all the time."""
    made = Clock()
    monkeypatch.setattr(runtime, "Reaper", partial(Reaper, now=made.now))
    monkeypatch.setattr(reaper, "TICK_SECONDS", 0.01)
    return made


def test_a_file_lives_as_long_as_the_request_says(services: Services, clock: Clock) -> None:
    with services.run() as service:
        short = save(service, ttl_seconds=1000, hidden_states_path="d/short.st")
        long = save(service, ttl_seconds=3600, hidden_states_path="d/long.st")
        forever = save(service, hidden_states_path="d/forever.st")
        record = service.record(short["save_id"], wait=0)
        lifetime = datetime.fromisoformat(record["expires"]) - datetime.fromisoformat(record["finished"])
        assert lifetime.total_seconds() == pytest.approx(1000, abs=0.002)
        assert service.record(forever["save_id"], wait=0)["expires"] is None
        clock.ahead_seconds = 1000
        until(lambda: has_status(service, short["save_id"], "expired"))
        names = {"long.st", "long.st.lock", "forever.st", "forever.st.lock"}
        assert {path.name for path in (service.root / "d").iterdir()} == names
        assert has_status(service, long["save_id"], "completed")
        response = service.client.get(short["url"])
        assert (response.status_code, response.json()["error"]["code"]) == (410, "gone")
        assert service.client.delete(f"/saves/{short['save_id']}").status_code == 204
        assert service.client.get(f"/saves/{short['save_id']}").status_code == 404


def test_the_servers_ttl_is_for_requests_that_do_not_say(services: Services, clock: Clock) -> None:
    with services.run(ttl_seconds=1000) as service:
        mine, theirs = save(service, ttl_seconds=3600), save(service)
        clock.ahead_seconds = 1000
        until(lambda: has_status(service, theirs["save_id"], "expired"))
        assert Path(mine["hidden_states_path"]).exists()


def test_what_expires_while_no_service_runs_is_removed_by_the_next_one(services: Services, clock: Clock) -> None:
    with services.run() as service:
        transfer = save(service, ttl_seconds=1000)
    path = Path(transfer["hidden_states_path"])
    assert path.exists()
    clock.ahead_seconds = 1000
    with services.run() as service:
        until(lambda: has_status(service, transfer["save_id"], "expired"))
        assert not path.exists()


def test_only_the_saves_own_file_expires(services: Services, clock: Clock) -> None:
    with services.run() as service:
        victim = service.root.parent / "victim"
        victim.write_bytes(b"somebody else's")
        linked, replaced, moved = (save(service, ttl_seconds=1000, hidden_states_path=f"{number}/x.st") for number in range(3))
        paths = [Path(transfer["hidden_states_path"]) for transfer in (linked, replaced, moved)]
        paths[0].unlink()
        paths[0].symlink_to(victim)
        paths[1].unlink()
        paths[1].write_bytes(b"another one")
        away = paths[2].rename(service.root / "away")
        clock.ahead_seconds = 1000
        for transfer in (linked, replaced, moved):
            until(partial(has_status, service, transfer["save_id"], "expired"))
        assert paths[0].is_symlink()
        assert victim.read_bytes() == b"somebody else's"
        assert paths[1].read_bytes() == b"another one"
        assert away.exists()


def test_the_key_of_an_expired_save_computes_anew(services: Services, clock: Clock) -> None:
    with services.run() as service:
        params = {"idempotency_key": "once", "ttl_seconds": 1000}
        first = save(service, **params)
        clock.ahead_seconds = 1000
        until(lambda: has_status(service, first["save_id"], "expired"))
        clock.ahead_seconds = 0
        second = save(service, **params)
        assert second["save_id"] != first["save_id"]
        assert Path(second["hidden_states_path"]).exists()


def test_old_records_are_purged_and_their_files_stay(services: Services, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "SWEEP_SECONDS", 0.01)
    with services.run(keep_records=1000) as service:
        transfer = save(service)
        clock.ahead_seconds = 1000
        until(lambda: service.client.get(f"/saves/{transfer['save_id']}").status_code == 404)
        assert Path(transfer["hidden_states_path"]).exists()


def removed_by_the_client(service: Service, transfer: dict[str, Any]) -> None:
    Path(transfer["hidden_states_path"]).unlink()


def moved_by_the_client(service: Service, transfer: dict[str, Any]) -> None:
    Path(transfer["hidden_states_path"]).rename(service.root / "moved")


def replaced_by_a_link(service: Service, transfer: dict[str, Any]) -> None:
    path = Path(transfer["hidden_states_path"])
    path.rename(service.root / "moved")
    path.symlink_to("moved")


def deleted_over_http(service: Service, transfer: dict[str, Any]) -> None:
    assert service.client.delete(f"/saves/{transfer['save_id']}").status_code == 204


WAYS = [removed_by_the_client, moved_by_the_client, replaced_by_a_link, deleted_over_http]


@pytest.mark.parametrize("make_room", WAYS, ids=lambda way: way.__name__)
def test_a_full_quota_refuses_until_there_is_room_again(services: Services, make_room: Callable[[Service, dict[str, Any]], None]) -> None:
    with services.run(max_saved_bytes=ROOM) as service:
        engine = service.runtime.services(for_new_work=True).engine
        first = save(service)
        computed = engine.stats().computed_tokens_total
        error = refused(service, "quota_exceeded")
        assert str(ROOM) in error["message"]
        assert engine.stats().computed_tokens_total == computed
        assert not list(service.root.rglob("x*"))
        assert len(service.client.get("/saves").json()["data"]) == 1
        make_room(service, first)
        assert save(service)["status"] == "completed"
        refused(service, "quota_exceeded")


def test_a_file_that_expires_makes_room(services: Services, clock: Clock) -> None:
    with services.run(max_saved_bytes=ROOM) as service:
        save(service, ttl_seconds=1000)
        clock.ahead_seconds = 1000
        assert save(service)["status"] == "completed"


@pytest.mark.usefixtures("clock")
def test_a_file_that_comes_back_counts_again(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "SWEEP_SECONDS", 0.01)
    with services.run(max_saved_bytes=ROOM) as service:
        path = Path(save(service)["hidden_states_path"])
        size = path.stat().st_size
        until(lambda: metric(service, "strata_saved_bytes") == [size])
        path.rename(service.root / "away")
        until(lambda: metric(service, "strata_saved_bytes") == [0])
        (service.root / "away").rename(path)
        until(lambda: metric(service, "strata_saved_bytes") == [size])
        assert metric(service, "strata_max_saved_bytes") == [ROOM]


def test_the_quota_counts_files_of_the_service_before(services: Services) -> None:
    with services.run() as service:
        save(service)
    with services.run(max_saved_bytes=ROOM) as service:
        refused(service, "quota_exceeded")


def test_running_saves_hold_what_they_may_need(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    with services.run(max_saved_bytes=ROOM) as service, ThreadPoolExecutor(1) as pool, PublishingGate(monkeypatch) as gate:
        first = pool.submit(save, service)
        gate.reached.wait()
        assert 38_400 < metric(service, "strata_reserved_bytes")[0] < ROOM
        refused(service, "quota_exceeded")
        gate.open.set()
        size = first.result()["bytes"]
        assert metric(service, "strata_reserved_bytes") == [0]
        until(lambda: metric(service, "strata_saved_bytes") == [size])


def test_saves_that_fail_give_back_what_they_held(services: Services, slow_steps: None) -> None:
    with services.run(max_saved_bytes=10**9) as service:
        long: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
        answer = service.complete(**long, n=3, kv_transfer_params={"wait": "accepted", "include_output_tokens": True}).json()
        assert metric(service, "strata_reserved_bytes")[0] > 3 * 200 * 3 * 32 * 4
        for choice in answer["choices"]:
            service.client.delete(f"/saves/{choice['kv_transfer_params']['save_id']}")
        service.refused(400, prompt=[10**6], kv_transfer_params={})
        path = {"hidden_states_path": "taken"}
        save(service, **path)
        service.refused(409, kv_transfer_params=path)
        assert metric(service, "strata_reserved_bytes") == [0]


def test_of_many_requests_at_once_no_more_are_let_in_than_fit(services: Services) -> None:
    with services.run(max_saved_bytes=5 * ROOM) as service, ThreadPoolExecutor(16) as pool:

        def ask(_: int) -> int:
            return service.complete(prompt=PROMPT, max_tokens=0, kv_transfer_params={}).status_code

        statuses = list(pool.map(ask, range(48)))
        files = [path.stat().st_size for path in service.root.glob("*.safetensors")]
        assert set(statuses) == {200, 507}
        assert len(files) == statuses.count(200)
        assert sum(files) <= 5 * ROOM < sum(files) + 2 * ROOM


def test_below_the_reserve_of_a_disk_nothing_is_begun(services: Services, caplog: pytest.LogCaptureFixture) -> None:
    with services.run(min_free_bytes=2**60) as service, caplog.at_level(logging.WARNING):
        engine = service.runtime.services(for_new_work=True).engine
        for _ in range(3):
            refused(service, "no_space")
        service.refused(507, stream=True, kv_transfer_params={})
        assert engine.stats().computed_tokens_total == 0
        assert not list(service.root.rglob("x*"))
        assert service.completed(prompt=PROMPT)["choices"]
        until(lambda: metric(service, "strata_disk_reserve_bytes") == [2**60])
        assert 0 < metric(service, "strata_disk_free_bytes")[0] < 2**60
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "nearly full" in line]) == 1
    assert len([line for line in lines if "a request was refused" in line]) == 1


def test_on_a_full_disk_only_a_service_without_a_reserve_tries(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(f_blocks=1000, f_frsize=4096, f_bavail=0)
    for min_free_bytes in (None, 1, 0):
        with services.run(min_free_bytes=min_free_bytes) as service, monkeypatch.context() as patch:
            patch.setattr(os, "fstatvfs", lambda fd: full)
            if min_free_bytes == 0:
                assert save(service)["status"] == "completed"
            else:
                refused(service, "no_space")


def test_a_repeated_key_is_answered_though_nothing_fits_any_more(services: Services) -> None:
    with services.run() as service:
        first = save(service, idempotency_key="kept")
    with services.run(min_free_bytes=2**60) as service:
        assert save(service, idempotency_key="kept")["save_id"] == first["save_id"]


@pytest.mark.parametrize(
    ("body", "params", "slack"),
    [
        ({}, {}, 64),
        ({"prompt": PROMPT}, {"layers": [0, 1, 2, "norm"], "dtype": "float32"}, 64),
        ({"prompt": PROMPT}, {"dtype": "float8_e4m3fn"}, 64),
        ({"prompt": PROMPT}, {"dtype": "bfloat16", "layers": [1]}, 64),
        ({"prompt": PROMPT}, {"positions": [[3, 7], [20, -5]]}, 128),
        ({"prompt": PROMPT}, {"positions": "last"}, 128),
        ({"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True}, {"positions": [[-60, 95]], "include_output_tokens": True}, 10**6),
        ({"prompt": PROMPT}, {"pooling": "mean"}, 64),
        ({"max_tokens": 100, "ignore_eos": True}, {"include_output_tokens": True}, 64),
        ({"max_tokens": 100, "ignore_eos": True}, {"include_last_token": True}, 64),
        ({"max_tokens": 200, "stop": "\x04"}, {"include_output_tokens": True}, 10**6),
        ({}, {"tensors": {"mask": [1] * 1000, "weights": [0.5] * 77, "bits": [True] * 9}, "metadata": {"ключ": "значение" * 50}}, 64),
    ],
)
def test_a_file_is_never_larger_than_what_was_reserved_for_it(
    service: Service, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], params: dict[str, Any], slack: int
) -> None:
    reserved: list[int] = []
    reserve = Space.reserve

    async def noted(space: Space, needs: Sequence[Need], written: Callable[[str], int], run: Runner) -> None:
        reserved.extend(need.bytes for need in needs)
        await reserve(space, needs, written, run)

    monkeypatch.setattr(Space, "reserve", noted)
    transfer = service.completed(**body, kv_transfer_params=params)["kv_transfer_params"]
    size = Path(transfer["hidden_states_path"]).stat().st_size
    assert size == transfer["bytes"] <= reserved[0] <= size + slack


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3"])
def test_files_are_verified_against_their_records_while_the_service_runs(
    services: Services, algorithm: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = services.settings().state_dir
    with services.run(checksum=algorithm) as service:
        path = Path(save(service)["hidden_states_path"])
        command = ["verify", str(path), "--state-dir", str(state)]
        assert main(command) == 0
        assert capsys.readouterr().out == f"{path}: ok, as recorded\n"
        data = bytearray(path.read_bytes())
        data[-100 * 8 - 4] ^= 1  # the last bit of a state's mantissa
        path.write_bytes(data)
        assert main(["verify", str(path), "--state-dir", str(state / "nothing")]) == 2
        assert main(command) == 1
        assert capsys.readouterr().out == f"{path}: its {algorithm} is not the one in its record\n"
    assert main(command) == 1
    monkeypatch.setenv("STRATA_STATE_DIR", str(state))
    assert main(command[:2]) == 1
    monkeypatch.setenv("STRATA_STATE_DIR", str(state / "nothing"))
    capsys.readouterr()
    assert main(command[:2]) == 0
    assert capsys.readouterr().out == f"{path}: ok\n"
    path.write_bytes(bytes(data) + b"\0" * 8)
    assert main(command) == 1


def test_the_record_holds_the_digest_that_xxhash_computes(services: Services) -> None:
    with services.run(checksum="xxh3") as service:
        transfer = save(service)
        digest = xxhash.xxh3_64(Path(transfer["hidden_states_path"]).read_bytes()).hexdigest()
        assert service.record(transfer["save_id"])["xxh3"] == digest
