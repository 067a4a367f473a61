"""The systems under test, behind one face: prompts in, a measured and checked round out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from benchmarks.client import Body, plain_body, run_round, saving_body, streamed, vllm_body
from benchmarks.machine import peak_rss_bytes, reset_peak_rss
from benchmarks.reference import Reference, Variant
from benchmarks.results import Round
from benchmarks.verify import check_and_remove
from benchmarks.workload import Prompts, Workload


class Server(Protocol):
    """A running HTTP server."""

    url: str

    @property
    def pid(self) -> int: ...


@dataclass(frozen=True)
class System:
    """One way of doing the work. `run` returns when everything has been answered and can be read."""

    label: str
    pid: int
    workload: Workload
    saves: bool
    run: Callable[[Prompts], Round]

    def measure(self, prompts: Prompts, width: int) -> Round:
        """One round: the clock is in `run`, the checks come after it. Raises `BenchmarkError` for a wrong file."""
        reset_peak_rss(self.pid)
        measured = replace(self.run(prompts), peak_rss_bytes=peak_rss_bytes(self.pid))
        if self.saves:
            check_and_remove(measured.answers, prompts, self.workload, width)
        return measured


def strata(label: str, server: Server, workload: Workload, *, saves: bool, stream: bool = False) -> System:
    """A running service; `stream`: asked for streams, so that every token has its time."""
    body = saving_body(workload) if saves else plain_body(workload)
    return _over_http(label, server, workload, streamed(body) if stream else body, saves=saves)


def vllm(label: str, server: Server, workload: Workload) -> System:
    """A running vLLM. It saves in the dtype that it computes in, which the workload must name."""
    return _over_http(label, server, workload, vllm_body(workload), saves=True)


def reference(label: str, script: Reference, variant: Variant, workload: Workload, directory: Path) -> System:
    """The transformers script; its files go to `directory`."""
    return System(label, script.pid, workload, True, lambda prompts: script.run_round(variant, prompts, directory))


def _over_http(label: str, server: Server, workload: Workload, body: Body, *, saves: bool) -> System:
    return System(label, server.pid, workload, saves, lambda prompts: run_round(server.url, workload, prompts, body))
