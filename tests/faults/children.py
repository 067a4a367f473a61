"""Services as processes of their own, which can be killed, stopped and counted; and what must be true of their files afterwards."""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from engine.saves.header import read_header
from engine.saves.inspect import inspect_file
from service.cli.launcher import ServiceProcess
from tests.http.child import RUN

SIZES = ["--kv-cache-tokens", "4096", "--state-cache-memory", "16MiB", "--threads", "1", "--device", "cpu", "--dtype", "float32"]
CLEANED_SECONDS = 120.0
"""Until orphans are surely removed, on however busy a machine: far more than it takes."""


def number_from_environment(name: str, default: int) -> int:
    """How long a test is to be: short unless the variable says otherwise."""
    return int(os.environ.get(name, default))


def flags(model: Path, root: Path, state: Path, *more: str) -> list[str]:
    """What `strata serve` needs for a tiny model."""
    places = ["--model", str(model), "--served-model-name", "tiny", "--save-root", str(root), "--state-dir", str(state)]
    return ["--port", "0", *places, *SIZES, *more]


@dataclass
class Child:
    """A running service and a client of it."""

    service: ServiceProcess
    client: httpx.Client

    @property
    def pid(self) -> int:
        return self.service.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        self.signal(signal.SIGKILL)
        self.service.kill()

    def complete(self, **body: Any) -> httpx.Response:  # noqa: ANN401 - any JSON value
        return self.client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True} | body)

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name and, in brackets, its labels' values."""
        families = text_string_to_metric_families(self.client.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        return {f"{sample.name}[{','.join(sample.labels.values())}]" if sample.labels else sample.name: sample.value for sample in samples}

    def settled(self) -> dict[str, float]:
        """Waits until the engine holds nothing, and returns the metrics of that moment. Loops for ever where it never does."""
        held = ("requests_running", "requests_waiting", "writer_queue_depth", "kv_blocks[referenced]", "state_pages[referenced]")
        while True:
            metrics = self.metrics()
            if not any(metrics[f"strata_{name}"] for name in held) and not self.unended():
                return metrics
            time.sleep(0.01)

    def unended(self) -> list[dict[str, Any]]:
        return [record for status in ("queued", "running", "writing") for record in self.records(status=status)]

    def records(self, **query: str) -> list[dict[str, Any]]:
        """All records, newest first."""
        found: list[dict[str, Any]] = []
        while True:
            after = {"after": found[-1]["id"]} if found else {}
            response = self.client.get("/saves", params={"limit": "500", **query, **after})
            assert response.status_code == 200, response.text
            page = response.json()
            found += page["data"]
            if not page["has_more"]:
                return found

    @property
    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    @property
    def num_threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[Child]:
    """`strata serve` as a child, ready."""
    with ServiceProcess(arguments) as service, httpx.Client(base_url=service.url, timeout=None, trust_env=False) as client:
        yield Child(service, client)


def ended(arguments: Sequence[str]) -> tuple[int, str]:
    """Runs a service that can't start; its exit status and what it said."""
    done = subprocess.run([sys.executable, "-c", RUN, "serve", *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def saved_files(root: Path) -> dict[str, str]:
    """The save id of every published file below a root."""
    found: dict[str, str] = {}
    for path in root.rglob("*.safetensors"):
        with path.open("rb") as file:
            found[str(path)] = read_header(file.fileno()).metadata["save_id"]
    return found


def orphans(root: Path) -> list[Path]:
    """Temporary files, and lock files without their file."""
    return [*root.rglob("*.part"), *(lock for lock in root.rglob("*.lock") if not lock.with_suffix("").exists())]


def check_nothing_is_left(root: Path) -> None:
    """No temporary file, no held lock, no lock file without its file. A service removes orphans in the background once it is ready."""
    deadline = time.monotonic() + CLEANED_SECONDS
    while orphans(root) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert orphans(root) == []
    for lock in root.rglob("*.lock"):
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def registry_rows(state: Path) -> list[sqlite3.Row]:
    """All records as they are kept, newest first; the service may be running."""
    with closing(sqlite3.connect(f"file:{state}/registry.sqlite3?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        return database.execute("SELECT * FROM saves ORDER BY sequence DESC").fetchall()


def check_records(state: Path, root: Path) -> dict[str, int]:
    """Records and files say the same: a completed save is the file under its path, that very inode, unless a later save has replaced it;
    any other has no file; and no file is without a record. Returns the number of records by status.
    """
    latest: dict[str, sqlite3.Row] = {}
    rows = registry_rows(state)
    for row in rows:
        if row["status"] == "completed":
            latest.setdefault(row["hidden_states_path"], row)
    known = {path: (row["id"], row["bytes"], row["device"], row["inode"]) for path, row in latest.items()}
    assert {path: _identity(Path(path), save_id) for path, save_id in saved_files(root).items()} == known
    return dict(Counter(row["status"] for row in rows))


def _identity(path: Path, save_id: str) -> tuple[str, int, str, str]:
    status = path.stat()
    return save_id, status.st_size, str(status.st_dev), str(status.st_ino)


def check_file(path: str | Path) -> None:
    report = inspect_file(path)
    assert report.ok, (path, report.problems)
