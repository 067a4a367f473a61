"""The benchmark counts what it says it counts, and refuses figures of wrong files."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import report
from benchmarks.client import BenchmarkError, run_round
from benchmarks.results import Answer, Round, summarize
from benchmarks.verify import check_and_remove
from benchmarks.workload import Workload, prefill, with_first_token

PROMPTS = [[1, 2, 3], [4, 5], [6]]
WORKLOAD = Workload("small", PROMPTS, layers=(1, 2), max_tokens=1, concurrency=2)
WIDTH = 4


def round_of(*seconds: float, wall: float = 1.0, tokens: int = 100, memory: int | None = None) -> Round:
    return Round(tokens, wall, [Answer(each, None) for each in seconds], memory)


def good_file(path: Path) -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.ones(3, 2, WIDTH, dtype=torch.bfloat16), "token_ids": torch.tensor(PROMPTS[0])}


def test_the_workload_is_64_prompts_of_24493_tokens() -> None:
    workload = prefill(concurrency=16)
    assert (len(workload.prompts), workload.num_prompt_tokens, workload.layers) == (64, 24_493, (2, 15, 28, 30))


def test_another_first_token_leaves_lengths_and_the_rest_alone() -> None:
    assert with_first_token(PROMPTS, 9) == [[9, 2, 3], [9, 5], [9]]


def test_latencies_are_nearest_ranks() -> None:
    measured = round_of(*(float(second) for second in range(1, 21)))
    assert (measured.latency(0.5), measured.latency(0.95), measured.latency(1.0)) == (11.0, 19.0, 20.0)


def test_a_summary_has_medians_over_rounds_and_the_largest_memory() -> None:
    rounds = [round_of(1.0, wall=1.0, memory=5), round_of(2.0, wall=2.0, memory=9), round_of(9.0, wall=4.0, memory=7)]
    summary = summarize("x", rounds)
    assert (summary.tokens_per_second, summary.slowest, summary.fastest) == (50.0, 25.0, 100.0)
    assert (summary.p50_seconds, summary.peak_rss_bytes) == (2.0, 9)


def test_ratios_compare_saving_with_the_script_and_with_not_saving() -> None:
    labels = {report.STRATA: 1.0, report.STRATA_WITHOUT: 0.8, report.REFERENCE: 2.0}
    lines = list(report.ratio_lines([summarize(label, [round_of(1.0, wall=wall)]) for label, wall in labels.items()]))
    assert [line.rsplit(" ", 1)[1] for line in lines[1:]] == ["2.000", "0.800"]


def test_the_json_holds_every_round(tmp_path: Path) -> None:
    machine = report.Machine("cpu", 2, 2, 1 << 30, {"torch": "2"}, 100.0, 1e8, 0.5)
    report.write_json(tmp_path / "x.json", machine, 99.0, WORKLOAD, {"a": [round_of(1.0), round_of(2.0)]})
    document = json.loads((tmp_path / "x.json").read_text())
    assert [each["p50_seconds"] for each in document["measured"]["a"]["rounds"]] == [1.0, 2.0]
    assert document["machine"]["matrix_gflops_after"] == 99.0
    assert document["workload"]["num_prompt_tokens"] == 6


def damaged(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: tensors | {name: change(tensors[name])}


def one_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda states: states.index_fill(2, torch.tensor([1]), value)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (damaged("hidden_states", lambda states: states[:2].clone()), "shape"),
        (damaged("hidden_states", lambda states: states.float()), "expected bfloat16"),
        (damaged("hidden_states", one_value(float("nan"))), "not finite"),
        (damaged("hidden_states", one_value(float("inf"))), "not finite"),
        (damaged("hidden_states", lambda states: states.index_fill(0, torch.tensor([1]), 0.0)), "rows of zeros"),
        (damaged("token_ids", lambda ids: ids + 1), "token ids"),
    ],
)
def test_a_wrong_file_ends_the_benchmark(
    damage: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    save_file(damage(good_file(path)), path)
    with pytest.raises(BenchmarkError, match=complaint):
        check_and_remove([Answer(1.0, path)], PROMPTS[:1], WORKLOAD, WIDTH)


def test_good_files_are_removed_with_their_locks(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(good_file(path), path)
    (tmp_path / "x.safetensors.lock").touch()
    check_and_remove([Answer(1.0, path)], PROMPTS[:1], WORKLOAD, WIDTH)
    assert list(tmp_path.iterdir()) == []


class Server(ThreadingHTTPServer):
    """Answers completions with a path made of the prompt, and notes how many it had to answer at once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.active = self.most_active = 0
        self.bodies: list[dict[str, Any]] = []
        self.status = 200


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.active += 1
            self.server.most_active = max(self.server.most_active, self.server.active)
        time.sleep(0.02)
        with self.server.lock:
            self.server.active -= 1
        answer: dict[str, Any] = {"choices": []}
        if "kv_transfer_params" in body:
            answer["kv_transfer_params"] = {"hidden_states_path": "/" + "-".join(str(token) for token in body["prompt"])}
        content = json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_answers_come_in_the_order_of_the_prompts_and_no_more_than_asked_at_once(server: Server) -> None:
    measured = run_round(f"http://127.0.0.1:{server.server_port}", WORKLOAD, PROMPTS, save=True)
    assert [answer.path for answer in measured.answers] == [Path("/1-2-3"), Path("/4-5"), Path("/6")]
    assert server.most_active == 2
    assert measured.num_prompt_tokens == 6
    assert {tuple(body["kv_transfer_params"]["layers"]) for body in server.bodies} == {(1, 2)}


def test_without_saving_nothing_is_said_about_hidden_states(server: Server) -> None:
    measured = run_round(f"http://127.0.0.1:{server.server_port}", WORKLOAD, PROMPTS, save=False)
    assert [answer.path for answer in measured.answers] == [None, None, None]
    assert not any("kv_transfer_params" in body for body in server.bodies)


def test_a_refused_request_ends_the_benchmark(server: Server) -> None:
    server.status = 500
    with pytest.raises(BenchmarkError, match="HTTP 500"):
        run_round(f"http://127.0.0.1:{server.server_port}", WORKLOAD, PROMPTS, save=True)
