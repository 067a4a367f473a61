"""SIGKILL at random moments over a running load. `STRATA_TEST_KILLS=200` is the full run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.cli.launcher import LaunchError, ServiceProcess
from tests.faults.children import (
    Child,
    check_file,
    check_nothing_is_left,
    check_records,
    flags,
    number_from_environment,
    registry_rows,
    running,
    saved_files,
)
from tests.http.child import RUN

KILLS = number_from_environment("STRATA_TEST_KILLS", 8)
NUM_CLIENTS = 6
MOST_ANSWERS = 24
MAX_DELAY_SECONDS = 0.05
Body = dict[str, Any]


@dataclass
class Ledger:
    """What the service has promised: the saves that a client has heard to be completed, by path."""

    saves: dict[str, str] = field(default_factory=dict)
    """The id of the last acknowledged save of every path."""
    count: int = 0
    repeatable: list[Body] = field(default_factory=list)
    """Requests with an idempotency key whose answers never came."""
    new: list[str] = field(default_factory=list)
    """Paths acknowledged since the last check."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def acknowledge(self, *transfers: dict[str, Any]) -> None:
        with self.lock:
            for transfer in transfers:
                assert transfer["status"] == "completed", transfer
                self.saves[transfer["hidden_states_path"]] = transfer.get("save_id") or transfer["id"]
                self.new.append(transfer["hidden_states_path"])
                self.count += 1


class LoadingClient:
    """Sends requests of all kinds one after the other until the service is gone. Nobody else writes to its paths."""

    def __init__(self, url: str, number: int, ledger: Ledger, seed: int) -> None:
        self._client = httpx.Client(base_url=url, timeout=None, trust_env=False)
        self._folder = f"client-{number}"
        self._ledger = ledger
        self._random = random.Random(seed)
        self._kinds: tuple[Callable[[], None], ...] = (
            self._wait,
            self._poll,
            self._accepted,
            self._replace,
            self._replace,
            self._group,
            self._stream,
            self._text_only,
            self._repeatable,
        )
        self.failure: BaseException | None = None

    def run(self) -> None:
        with self._client:
            try:
                while True:
                    self._random.choice(self._kinds)()
            except httpx.TransportError:
                pass  # killed
            except BaseException as error:
                self.failure = error

    def _new_path(self) -> str:
        return f"{self._folder}/{self._random.getrandbits(64):016x}.safetensors"

    def _body(self, **transfer: Any) -> Body:  # noqa: ANN401 - any JSON value
        prompt = "".join(self._random.choices("abcdefgh ", k=self._random.randint(1, 150)))
        body = {"prompt": prompt, "max_tokens": self._random.randint(1, 60), "temperature": 0, "ignore_eos": True}
        return body | {"kv_transfer_params": {"include_output_tokens": self._random.random() < 0.7, **transfer}}

    def _post(self, body: Body, status: int = 200) -> dict[str, Any]:
        response = self._client.post("/v1/completions", json=body)
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def _wait(self) -> None:
        self._ledger.acknowledge(self._post(self._body(hidden_states_path=self._new_path()))["kv_transfer_params"])

    def _text_only(self) -> None:
        self._post(self._body() | {"kv_transfer_params": None})

    def _poll(self) -> None:
        self._seen_completed(self._post(self._body(hidden_states_path=self._new_path(), wait=False)))

    def _accepted(self) -> None:
        record = self._seen_completed(self._post(self._body(hidden_states_path=self._folder + "/", wait="accepted"), 202))
        assert record["output"]["token_ids"]

    def _seen_completed(self, answer: dict[str, Any]) -> dict[str, Any]:
        record: dict[str, Any] = self._client.get(f"/saves/{answer['kv_transfer_params']['save_id']}", params={"wait": 60}).json()
        self._ledger.acknowledge(record)
        return record

    def _replace(self) -> None:
        path = f"{self._folder}/replaced-{self._random.randrange(2)}.safetensors"
        self._ledger.acknowledge(self._post(self._body(hidden_states_path=path, on_conflict="replace"))["kv_transfer_params"])

    def _group(self) -> None:
        answer = self._post(self._body(hidden_states_path=self._folder) | {"n": 3})
        self._ledger.acknowledge(*(choice["kv_transfer_params"] for choice in answer["choices"]))

    def _stream(self) -> None:
        body = self._body(hidden_states_path=self._folder + "/") | {"n": self._random.randint(1, 2), "stream": True}
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            for event in _events(response):
                assert "error" not in event, event
                self._ledger.acknowledge(
                    *(choice["kv_transfer_params"] for choice in event["choices"] if choice["finish_reason"] is not None)
                )

    def _repeatable(self) -> None:
        body = self._body(idempotency_key=f"key-{self._random.getrandbits(64)}", hidden_states_path=self._new_path())
        try:
            self._ledger.acknowledge(self._post(body)["kv_transfer_params"])
        except httpx.TransportError:
            self._ledger.repeatable.append(body)
            raise


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    assert response.status_code == 200
    for line in response.iter_lines():
        if line.startswith("data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            yield event


def kill_under_load(child: Child, ledger: Ledger, num_answers: int, seconds: float, seed: int) -> None:
    """Kills the service some time after so many saves have been acknowledged."""
    enough = ledger.count + num_answers
    clients = [LoadingClient(child.service.url, number, ledger, seed * NUM_CLIENTS + number) for number in range(NUM_CLIENTS)]
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    while ledger.count < enough and any(thread.is_alive() for thread in threads):
        time.sleep(0.001)
    time.sleep(seconds)
    child.kill()
    for thread in threads:
        thread.join()
    for client in clients:
        if client.failure is not None:
            raise client.failure


def kill_while_it_starts(arguments: list[str], seconds: float) -> None:
    """The second crash comes while the first is being recovered from, or before, or just after."""
    starting = ServiceProcess(arguments)
    killer = threading.Timer(seconds, lambda: os.kill(starting.pid, signal.SIGKILL))
    killer.start()
    with contextlib.suppress(LaunchError):
        starting.start()
    killer.join()
    starting.kill()


def check_promises(child: Child, ledger: Ledger, root: Path, state: Path) -> dict[str, int]:
    check_nothing_is_left(root)
    statuses = check_records(state, root)
    assert set(statuses) <= {"completed", "failed"}
    files, order = saved_files(root), [row["id"] for row in registry_rows(state)]
    for path, acknowledged in ledger.saves.items():
        # A save whose answer was on its way may have replaced the last one that was acknowledged; only a later one can.
        assert order.index(files[path]) <= order.index(acknowledged), path
    for path in ledger.new:
        check_file(path)
    ledger.new.clear()
    return statuses


def repeat_unanswered(child: Child, ledger: Ledger) -> None:
    """A key finds the save that the crash has left completed, or computes it anew: never half of an answer."""
    for body in ledger.repeatable:
        plain = child.complete(**{name: value for name, value in body.items() if name != "kv_transfer_params"}).json()
        repeated = child.complete(**body)
        assert repeated.status_code == 200, repeated.text
        assert repeated.json()["choices"][0]["text"] == plain["choices"][0]["text"]
        assert repeated.json()["usage"]["completion_tokens"] == body["max_tokens"]
        ledger.acknowledge(repeated.json()["kv_transfer_params"])
    ledger.repeatable.clear()


def test_a_kill_at_any_moment_loses_and_tears_nothing(
    model_folder: Path, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    root, state = tmp_path / "saves", tmp_path / "state"
    arguments = flags(model_folder, root, state, "--max-batch-tokens", "128")
    ledger, moments = Ledger(), random.Random(1)
    statuses: dict[str, int] = {}
    for number in range(NUM_CLIENTS):
        (root / f"client-{number}").mkdir(parents=True)  # a name without a slash stands for a directory only where there is one
    for number in range(KILLS):
        if number % 8 == 7:
            kill_while_it_starts(arguments, moments.uniform(1.0, 3.0))
        else:
            with running(arguments) as child:
                statuses = check_promises(child, ledger, root, state)
                repeat_unanswered(child, ledger)
                kill_under_load(child, ledger, moments.randint(0, MOST_ANSWERS), moments.uniform(0.0, MAX_DELAY_SECONDS), number)
    with running(arguments) as child:
        ledger.new = list(ledger.saves)
        statuses = check_promises(child, ledger, root, state)
    counts = {"kills": KILLS, "acknowledged": ledger.count, "files": len(saved_files(root)), **statuses}
    record_property("counts", counts)
    print(counts)
    assert ledger.count > KILLS
    assert statuses["failed"], "no kill has hit a save"


DIES_WITH_A_LOCK = """
import os
from {module} import {owner}
def dying(*arguments, **options):
    os.kill(os.getpid(), 9)
{owner}.{name} = dying
"""
MOMENTS = {
    "the lock is had": ("service.saves.space", "Space", "reserve"),
    "room is reserved": ("service.registry.registry", "Registry", "insert"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_between_a_lock_and_its_record_leaves_nothing_after_a_start(model_folder: Path, tmp_path: Path, moment: str) -> None:
    root = tmp_path / "saves"
    arguments = flags(model_folder, root, tmp_path / "state")
    module, owner, name = MOMENTS[moment]
    patch = DIES_WITH_A_LOCK.format(module=module, owner=owner, name=name)
    with subprocess.Popen([sys.executable, "-c", patch + RUN, "serve", *arguments], stdout=subprocess.PIPE, text=True) as dying:
        assert dying.stdout is not None
        url = dying.stdout.readline().split()[-1]
        body = {"prompt": "Hello", "max_tokens": 1, "kv_transfer_params": {"hidden_states_path": "dir/x.safetensors"}}
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/v1/completions", json=body, timeout=None, trust_env=False)
    assert dying.returncode == -signal.SIGKILL
    lock, others = root / "dir/x.safetensors.lock", [root / "dir/y.lock", root / "dir/z.lock"]
    assert lock.exists()
    others[0].touch()
    others[1].write_text(lock.read_text().replace("strata ", "strata 0"))
    with running(flags(model_folder, root, tmp_path / "another")):
        assert lock.exists(), "another service has removed it"
    with running(arguments) as child:
        # Without a record it is found by the walk through the root, which goes on once the service is ready.
        for _ in range(600):
            if not lock.exists():
                break
            time.sleep(0.1)
        assert not lock.exists()
        assert child.records() == []
        assert child.complete(**body).status_code == 200
    assert all(other.exists() for other in others)


DIES_IN_A_GROUP = """
import os, threading
from itertools import count
from {module} import {owner}
calls, plain, one_at_a_time = count(1), {owner}.{name}, threading.Lock()
def dying(*arguments, **options):
    with one_at_a_time:
        number = next(calls)
        if number == {number} and not {after}:
            os.kill(os.getpid(), 9)
        answer = plain(*arguments, **options)
        if number == {number}:
            os.kill(os.getpid(), 9)
        return answer
{owner}.{name} = dying
"""
PUBLISHING, COMMITTING = ("engine.saves", "builder", "publish_file"), ("service.registry", "queries", "end")
GROUP_MOMENTS = {
    "before the first file": (*PUBLISHING, 1, False),
    "between the files": (*PUBLISHING, 2, False),
    "before the commit": (*COMMITTING, 1, False),
    "within the commit": (*COMMITTING, 1, True),
}


GROUP_KILLS = [
    ("before the first file", {}),
    ("between the files", {"wait": False}),
    ("between the files", {"idempotency_key": "k"}),
    ("before the commit", {"idempotency_key": "k"}),
    ("within the commit", {}),
]


@pytest.mark.parametrize(("moment", "transfer"), GROUP_KILLS)
def test_a_killed_group_is_whole_or_has_left_nothing(model_folder: Path, tmp_path: Path, moment: str, transfer: Body) -> None:
    root, state = tmp_path / "saves", tmp_path / "state"
    arguments = flags(model_folder, root, state)
    module, owner, name, number, after = GROUP_MOMENTS[moment]
    patch = DIES_IN_A_GROUP.format(module=module, owner=owner, name=name, number=number, after=after)
    with subprocess.Popen([sys.executable, "-c", patch + RUN, "serve", *arguments], stdout=subprocess.PIPE, text=True) as dying:
        assert dying.stdout is not None
        url = dying.stdout.readline().split()[-1]
        body: Body = {"prompt": "Hello", "n": 2, "max_tokens": 1, "kv_transfer_params": {"hidden_states_path": "dir/", **transfer}}
        with contextlib.suppress(httpx.TransportError):  # without waiting the answer may have come
            httpx.post(f"{url}/v1/completions", json=body, timeout=None, trust_env=False)
    assert dying.returncode == -signal.SIGKILL
    published = len(list((root / "dir").glob("*.safetensors")))
    assert published == {"before the first file": 0, "between the files": 1}.get(moment, 2)
    with running(arguments) as child:
        statuses = check_records(state, root)
        # With a key the text is stored beside the files: if it wasn't yet, they are removed, and the repeat below computes them again.
        whole = published == 2 and ("idempotency_key" not in transfer or "completed" in statuses)
        assert statuses == ({"completed": 2} if whole else {"failed": 2})
        assert len(saved_files(root)) == (2 if whole else 0)
        check_nothing_is_left(root)
        if "idempotency_key" in transfer:
            answer = child.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert [choice["kv_transfer_params"]["status"] for choice in answer.json()["choices"]] == ["completed"] * 2
            assert len(saved_files(root)) == 2
