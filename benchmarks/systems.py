"""The systems under test, behind one face: prompts in, a measured and checked round out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.client import run_round
from benchmarks.machine import peak_rss_bytes, reset_peak_rss
from benchmarks.reference import Reference
from benchmarks.results import Round
from benchmarks.verify import check_and_remove
from benchmarks.workload import Prompts, Workload
from service.launcher import ServiceProcess


@dataclass(frozen=True)
class System:
    """One way of doing the work. `run` returns when everything has been answered."""

    label: str
    pid: int
    saves: bool
    run: Callable[[Prompts], Round]

    def measure(self, workload: Workload, prompts: Prompts, width: int) -> Round:
        """One round: the clock is in `run`, the checks come after it. Raises `BenchmarkError` for a wrong file."""
        reset_peak_rss(self.pid)
        measured = replace(self.run(prompts), peak_rss_bytes=peak_rss_bytes(self.pid))
        if self.saves:
            check_and_remove(measured.answers, prompts, workload, width)
        return measured


def strata(label: str, service: ServiceProcess, workload: Workload, saves: bool) -> System:
    """A running service."""
    return System(label, service.pid, saves, lambda prompts: run_round(service.url, workload, prompts, saves))


def reference(label: str, script: Reference, directory: Path) -> System:
    """The transformers script; its files go to `directory`."""
    return System(label, script.pid, True, lambda prompts: script.run_round(prompts, directory))
