"""Clients that leave at random moments. `STRATA_TEST_DISCONNECTS=1000` is the full run."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.children import (
    Child,
    check_file,
    check_nothing_is_left,
    check_records,
    flags,
    number_from_environment,
    registry_rows,
    running,
)

LEAVERS = number_from_environment("STRATA_TEST_DISCONNECTS", 120)
NUM_CLIENTS = 8
"""At once: more than run, so that some leave while they are queued."""
RUNNING = 4
MARGIN_BYTES = 16 * 2**20
HARD_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER of no seconds: the kernel sends a reset instead of closing in good order."""


@dataclass(frozen=True)
class Leaver:
    """What one client asks for, and when and how it goes."""

    body: dict[str, Any]
    seconds: float
    """From sending to leaving; longer than most requests take now and then."""
    way: str
    sent: float
    """The part of the request that is sent before it goes."""

    @classmethod
    def any(cls, choose: random.Random, number: int) -> Leaver:
        prompt = "".join(choose.choices("abcdefgh ", k=choose.choice((3, 60, 180))))
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": choose.choice((0, 4, 60)), "temperature": 0, "ignore_eos": True}
        body |= {"n": choose.choice((1, 1, 3)), "stream": choose.random() < 0.4, "request_id": f"leaver-{number}"}
        if choose.random() < 0.8:
            body["kv_transfer_params"] = {"include_output_tokens": True, "hidden_states_path": f"{number % 7}/", "layers": list(range(7))}
        sent = choose.uniform(0.0, 1.0) if choose.random() < 0.1 else 1.0
        return cls(body, choose.choice((0.0, 0.01, 0.05, 0.1, 0.3, 0.6)) * choose.random(), choose.choice(("reset", "close", "half")), sent)

    @property
    def groups_saves(self) -> bool:
        return not self.body["stream"]

    def run(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            content = json.dumps(self.body).encode()
            kind = f"Content-Type: application/json\r\nContent-Length: {len(content)}"
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n\r\n"
            request = head.encode() + content
            connection.sendall(request[: int(self.sent * len(request))])
            time.sleep(self.seconds)
            self._leave(connection)

    def _leave(self, connection: socket.socket) -> None:
        if self.way == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HARD_CLOSE)
        elif self.way == "half":
            # It goes on listening; the service may answer what it has got ready, but must not wait for more of it.
            with contextlib.suppress(ConnectionError):
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass


def leave(child: Child, leavers: list[Leaver]) -> None:
    """Runs them, `NUM_CLIENTS` at once."""
    waiting = iter(leavers)
    taking, failures = threading.Lock(), list[BaseException]()

    def work() -> None:
        while True:
            with taking:
                leaver = next(waiting, None)
            if leaver is None:
                return
            try:
                leaver.run(child.service.url)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def check_groups(state: Path, leavers: list[Leaver]) -> None:
    """The choices of one whole answer are saved together or not at all."""
    together = {leaver.body["request_id"] for leaver in leavers if leaver.groups_saves}
    groups = defaultdict(set)
    for row in registry_rows(state):
        groups[row["request_id"]].add(row["status"] == "completed")
    assert [request_id for request_id in together if len(groups[request_id]) > 1] == []


def test_whoever_leaves_leaves_nothing_behind(model_folder: Path, tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    choose = random.Random(2)
    leavers = [Leaver.any(choose, number) for number in range(LEAVERS)]
    root, state = tmp_path / "saves", tmp_path / "state"
    arguments = flags(model_folder, root, state, "--max-running", str(RUNNING), "--max-batch-tokens", "64")
    with running(arguments) as child:
        child.complete(kv_transfer_params={})
        warm_up, first, second = leavers[: LEAVERS // 4], leavers[LEAVERS // 4 : LEAVERS // 2], leavers[LEAVERS // 2 :]
        leave(child, warm_up)
        child.settled()
        descriptors = child.num_descriptors
        leave(child, first)
        child.settled()
        resident = child.resident_bytes
        leave(child, second)
        metrics = child.settled()
        check_nothing_is_left(root)
        statuses = check_records(state, root)
        check_groups(state, leavers)
        for path in root.rglob("*.safetensors"):
            check_file(path)
        assert child.num_descriptors == descriptors
        growth = child.resident_bytes - resident
        assert growth < MARGIN_BYTES
        # The service is as good as new.
        answers = [child.complete(n=3, max_tokens=60, kv_transfer_params={"hidden_states_path": "0/"}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
    aborted = int(metrics["strata_requests_total[aborted]"])
    counts = {"clients": LEAVERS, "aborted": aborted, "growth_bytes": growth, **statuses}
    record_property("counts", counts)
    print(counts)
    assert set(statuses) == {"completed", "cancelled", "failed"} or set(statuses) == {"completed", "cancelled"}
    assert aborted > LEAVERS // 4
