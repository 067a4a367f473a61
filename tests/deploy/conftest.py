"""A Prometheus of the tests' own, and a tiny service that it watches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.deploy.monitoring import Live, running_prometheus, work_through
from tests.faults.children import flags, running
from tests.http.conftest import model_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["model_folder"]


@pytest.fixture(scope="session")
def live(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    place = tmp_path_factory.mktemp("live")
    options = flags(model_folder, place / "saves", place / "state", "--max-saved-bytes", "1GiB", "--min-free-bytes", "1MiB")
    with running(options) as child, running_prometheus(child.service.url, place) as prometheus:
        prometheus.wait_for("strata_disk_free_bytes")
        work_through(child)
        done = child.settled()
        prometheus.wait_for(f"strata_saves_total{{outcome='completed'}} == {done['strata_saves_total[completed]']}")
        yield Live(child, prometheus, time.time())
