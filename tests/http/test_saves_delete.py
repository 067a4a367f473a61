"""`DELETE /saves/{id}`: cancels or removes, and never touches anything but the save's own file."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.errors import SaveError
from engine.saves import builder
from service.http.auth import hashed_line, new_key
from service.saves import deletion
from service.saves import files as saved_files
from tests.http.gate import PublishingGate

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.http.conftest import Service, Services

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
FOREIGN = b"somebody else's"


def saved(service: Service, **params: Any) -> tuple[str, Path]:  # noqa: ANN401 - fields of kv_transfer_params
    transfer = service.completed(kv_transfer_params=params)["kv_transfer_params"]
    return transfer["save_id"], Path(transfer["hidden_states_path"])


def delete(service: Service, save_id: str) -> int:
    response = service.client.delete(f"/saves/{save_id}")
    assert (response.status_code, response.content) in ((204, b""), (500, response.content))
    return response.status_code


def exists(service: Service, save_id: str) -> bool:
    return service.client.get(f"/saves/{save_id}").status_code == 200


def accepted(service: Service, **params: Any) -> str:  # noqa: ANN401 - fields of kv_transfer_params
    response = service.complete(**LONG, kv_transfer_params={"wait": "accepted", "include_output_tokens": True} | params)
    assert response.status_code == 202
    save_id: str = response.json()["kv_transfer_params"]["save_id"]
    return save_id


def test_file_lock_file_and_record_are_removed_and_that_again_is_fine(service: Service) -> None:
    save_id, path = saved(service, hidden_states_path="d/x.safetensors")
    lock = path.with_name(path.name + ".lock")
    assert path.exists()
    assert lock.exists()
    assert [delete(service, save_id) for _ in range(3)] == [204, 204, 204]
    assert list(path.parent.iterdir()) == []
    assert not exists(service, save_id)
    assert service.client.get("/saves", params={"prefix": "d/"}).json()["data"] == []
    assert service.client.get(f"/saves/{save_id}/file").status_code == 404


def test_an_unknown_save_is_removed_already(service: Service) -> None:
    assert delete(service, "0" * 32) == delete(service, "nothing") == 204


def test_the_path_of_a_removed_save_can_be_used_again(service: Service) -> None:
    save_id, path = saved(service, hidden_states_path="again.safetensors")
    delete(service, save_id)
    assert saved(service, hidden_states_path="again.safetensors")[1] == path


def test_a_running_save_is_cancelled_and_its_record_says_so(services: Services, slow_steps: None) -> None:
    with services.run() as service:
        save_id = accepted(service)
        while service.record(save_id, wait=0)["status"] == "queued":
            pass
        assert delete(service, save_id) == 204
        record = service.record(save_id, wait=0)
        assert (record["status"], record["error"]["code"]) == ("cancelled", "cancelled")
        assert list(service.root.iterdir()) == []
        service.settled()
        assert service.runtime.services(for_new_work=True).engine.stats().computed_tokens_total < 150
        assert delete(service, save_id) == 204
        assert not exists(service, save_id)


def test_a_queued_save_is_cancelled_and_the_running_one_goes_on(services: Services, slow_steps: None) -> None:
    with services.run(max_running=1) as service:
        running, queued = accepted(service), accepted(service)
        assert delete(service, queued) == 204
        assert service.record(queued, wait=0)["status"] == "cancelled"
        assert service.record(running)["status"] == "completed"


def test_the_client_that_waits_for_a_cancelled_save_is_answered(services: Services, slow_steps: None) -> None:
    with services.run() as service, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.refused, 503, **LONG, kv_transfer_params={"include_output_tokens": True})
        while not (listed := service.client.get("/saves").json()["data"]):
            pass
        assert delete(service, listed[0]["id"]) == 204
        assert waiting.result()["save_id"] == listed[0]["id"]


def test_a_save_that_is_just_being_published_is_removed_afterwards(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool, PublishingGate(monkeypatch) as gate:
        save_id = service.completed(kv_transfer_params={"wait": False, "hidden_states_path": "late/x"})["kv_transfer_params"]["save_id"]
        gate.reached.wait()
        deleting = pool.submit(delete, service, save_id)
        time.sleep(0.1)
        assert not deleting.done()
        gate.open.set()
        assert deleting.result() == 204
    assert not exists(service, save_id)
    assert list((service.root / "late").iterdir()) == []


def test_an_answer_does_not_wait_for_a_disk_that_hangs(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "ANSWER_SECONDS", 0.05)
    with PublishingGate(monkeypatch) as gate:
        save_id = service.completed(kv_transfer_params={"wait": False, "hidden_states_path": "hangs/x"})["kv_transfer_params"]["save_id"]
        gate.reached.wait()
        assert delete(service, save_id) == 204
    while exists(service, save_id):
        pass
    assert list((service.root / "hangs").iterdir()) == []


def test_one_choice_of_a_group_takes_the_others_with_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(2) as pool, PublishingGate(monkeypatch, free=1) as gate:
        waiting = pool.submit(service.refused, 503, n=2, request_id="pair", kv_transfer_params={"hidden_states_path": "pair/"})
        gate.reached.wait()
        while not list((service.root / "pair").glob("*.safetensors")):
            pass
        published = next((service.root / "pair").glob("*.safetensors"))
        assert delete(service, published.stem) == 204
        gate.open.set()
        assert waiting.result()["save_id"] == published.stem
    records = service.client.get("/saves", params={"request_id": "pair"}).json()["data"]
    assert {record["id"]: record["status"] for record in records}[published.stem] == "cancelled"
    assert {record["status"] for record in records} <= {"cancelled", "failed"}
    assert list((service.root / "pair").iterdir()) == []


def test_where_the_file_can_not_be_removed_nothing_changes(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    save_id, path = saved(service, hidden_states_path="stuck.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(saved_files, "_remove_file", lambda *_: (_ for _ in ()).throw(OSError(5, f"I/O error on {path}")))
        response = service.client.delete(f"/saves/{save_id}")
        assert (response.status_code, response.json()["error"]["code"]) == (500, "io_error")
        assert str(path) not in response.text
    assert exists(service, save_id)
    assert delete(service, save_id) == 204
    assert not path.exists()


def test_a_file_that_can_not_be_taken_back_keeps_nobody_waiting(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, calls = builder.publish_file, []

    def fail_the_second(*arguments: Any, **options: Any) -> None:  # noqa: ANN401 - passed on
        calls.append(arguments)
        if len(calls) == 2:
            raise SaveError("conflict", "the file exists")
        publish(*arguments, **options)

    monkeypatch.setattr(builder, "publish_file", fail_the_second)
    monkeypatch.setattr(saved_files, "_remove_file", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
    service.refused(409, n=2, request_id="untaken", kv_transfer_params={})
    records = service.client.get("/saves", params={"request_id": "untaken"}).json()["data"]
    assert {record["status"] for record in records} == {"failed"}


# What clients do to published files.


def moved(path: Path) -> list[Path]:
    return [path.rename(path.with_name("moved.st"))]


def replaced(path: Path) -> list[Path]:
    path.with_name("new").write_bytes(FOREIGN)
    return [path.with_name("new").replace(path)]


def linked_to_itself(path: Path) -> list[Path]:
    path.rename(path.with_name("moved.st"))
    path.symlink_to("moved.st")
    return [path, path.with_name("moved.st")]


def linked_outside(path: Path) -> list[Path]:
    victim = path.parents[2] / "victim"
    victim.write_bytes(FOREIGN)
    path.unlink()
    path.symlink_to(victim)
    return [path, victim]


def directory_linked(path: Path) -> list[Path]:
    elsewhere = path.parent.rename(path.parent.with_name(path.parent.name + "-elsewhere"))
    path.parent.symlink_to(elsewhere)
    return [elsewhere / path.name, elsewhere / f"{path.name}.lock"]


def overwritten(path: Path) -> list[Path]:
    """What it looks like when a new file has got the inode of the deleted one, and the same size."""
    path.write_bytes(b"x" * path.stat().st_size)
    return [path]


def made_a_directory(path: Path) -> list[Path]:
    path.unlink()
    path.mkdir()
    return [path]


CHANGES = [moved, replaced, linked_to_itself, linked_outside, directory_linked, overwritten, made_a_directory]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_client_has_put_in_place_of_the_file_stays(service: Service, change: Callable[[Path], list[Path]]) -> None:
    save_id, path = saved(service, hidden_states_path=f"{change.__name__}/x.safetensors")
    kept = {place: (place.lstat().st_ino, place.is_dir() or place.read_bytes()) for place in change(path)}
    assert delete(service, save_id) == 204
    assert {place: (place.lstat().st_ino, place.is_dir() or place.read_bytes()) for place in kept} == kept
    assert not exists(service, save_id)


def test_the_lock_file_goes_with_a_file_that_was_moved_and_stays_beside_another_one(service: Service) -> None:
    for number, change in enumerate((moved, replaced)):
        save_id, path = saved(service, hidden_states_path=f"locks-{number}/x.safetensors")
        change(path)
        delete(service, save_id)
        assert path.with_name("x.safetensors.lock").exists() is (change is replaced)


def test_a_directory_that_is_gone_is_no_failure(service: Service) -> None:
    save_id, path = saved(service, hidden_states_path="gone/x.safetensors")
    shutil.rmtree(path.parent)
    assert delete(service, save_id) == 204
    assert not path.parent.exists()


def test_a_lock_file_that_a_client_holds_stays(service: Service) -> None:
    save_id, path = saved(service, hidden_states_path="held.safetensors")
    lock = path.with_name("held.safetensors.lock")
    with lock.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert delete(service, save_id) == 204
    assert not path.exists()
    assert lock.exists()


def test_of_two_saves_of_one_path_the_older_one_has_no_file_any_more(service: Service) -> None:
    first, path = saved(service, hidden_states_path="twice.safetensors")
    second, _ = saved(service, hidden_states_path="twice.safetensors", on_conflict="replace")
    content = path.read_bytes()
    assert delete(service, first) == 204
    assert path.read_bytes() == content
    assert delete(service, second) == 204
    assert not path.exists()


def test_a_file_that_takes_the_name_at_the_last_moment_keeps_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    save_id, path = saved(service, hidden_states_path="last/x.safetensors")
    rename = os.rename

    def late(source: str, destination: str, **options: Any) -> None:  # noqa: ANN401 - passed on
        if source == path.name:
            replaced(path)
        rename(source, destination, **options)

    monkeypatch.setattr(saved_files.os, "rename", late)
    assert delete(service, save_id) == 204
    assert path.read_bytes() == FOREIGN
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["x.safetensors", "x.safetensors.lock"]


def test_a_file_whose_name_is_taken_while_it_gets_it_back_is_kept_under_another(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    save_id, path = saved(service, hidden_states_path="both/x.safetensors")
    rename = os.rename

    def late(source: str, destination: str, **options: Any) -> None:  # noqa: ANN401 - passed on
        if source == path.name:
            replaced(path)
        rename(source, destination, **options)
        if source == path.name:
            path.write_bytes(b"a third one")

    monkeypatch.setattr(saved_files.os, "rename", late)
    assert delete(service, save_id) == 204
    assert path.read_bytes() == b"a third one"
    assert [entry.read_bytes() for entry in path.parent.glob("x.safetensors.????????")] == [FOREIGN]


def test_clients_that_swap_files_for_links_all_the_time_lose_nothing(service: Service) -> None:
    """Every file is swapped for a link to a victim and back while it is downloaded and removed."""
    victim = service.root.parent / "prey"
    victim.write_bytes(FOREIGN)
    files = dict(saved(service, hidden_states_path=f"swapped/{number}.safetensors") for number in range(15))
    contents = {save_id: path.read_bytes() for save_id, path in files.items()}
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for path in files.values():
                other = path.with_name("other")
                other.symlink_to(victim)
                if path.exists() and not path.is_symlink():
                    path.rename(path.with_name(path.name + "-away"))
                other.rename(path)
                path.with_name(path.name + "-away").rename(path)

    def swap_until_removed() -> None:
        while not done.is_set():
            try:
                swap()
            except FileNotFoundError:  # the service was faster
                (service.root / "swapped" / "other").unlink(missing_ok=True)

    with ThreadPoolExecutor(1) as pool:
        swapping = pool.submit(swap_until_removed)
        for save_id, content in contents.items():
            for _ in range(4):
                answer = service.client.get(f"/saves/{save_id}/file")
                assert answer.status_code in (200, 410)
                assert answer.status_code == 410 or answer.content == content
            assert delete(service, save_id) == 204
        done.set()
        swapping.result()
    assert victim.read_bytes() == FOREIGN
    left = [path for path in (service.root / "swapped").iterdir() if not path.is_symlink() and path.suffix != ".lock"]
    assert {path.read_bytes() for path in left} <= set(contents.values())


def test_a_key_cannot_remove_or_download_the_saves_of_another(services: Services, tmp_path: Path) -> None:
    keys = [new_key(), new_key()]
    file = tmp_path / "keys"
    file.write_text("".join(f"{hashed_line(key)}\n" for key in keys))
    with services.run(api_keys_file=file) as service:
        mine, others = ({"Authorization": f"Bearer {key}"} for key in keys)
        service.client.headers.update(mine)
        save_id, path = saved(service)
        assert service.client.delete(f"/saves/{save_id}", headers=others).status_code == 204
        assert service.client.get(f"/saves/{save_id}/file", headers=others).status_code == 404
        assert service.client.get(f"/saves/{save_id}/file").content == path.read_bytes()
        assert delete(service, save_id) == 204
        assert not path.exists()
