"""The benchmark counts what it says it counts, and refuses figures of wrong files."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import report
from benchmarks.client import BenchmarkError, Body, plain_body, run_round, saving_body, streamed, vllm_body
from benchmarks.results import Answer, Round, summarize
from benchmarks.rounds import in_turn, paired_ratio, take_turns
from benchmarks.systems import System
from benchmarks.targets import Row, at_least, at_most, target_lines
from benchmarks.verify import check_and_remove
from benchmarks.workload import Workload, extraction, generation, shared_prefixes, up_to_the_middle, with_first_token

PROMPTS = [[1, 2, 3], [4, 5], [6]]
WORKLOAD = Workload("small", PROMPTS, layers=(1, 2), max_tokens=1, concurrency=2)
WIDTH = 4


def round_of(*seconds: float, wall: float = 1.0, tokens: int = 100, memory: int | None = None) -> Round:
    return Round(tokens, wall, [Answer(each, None) for each in seconds], memory)


def good_file(path: Path) -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.ones(3, 2, WIDTH, dtype=torch.bfloat16), "token_ids": torch.tensor(PROMPTS[0])}


def test_the_workload_is_64_prompts_of_24493_tokens() -> None:
    workload = extraction(concurrency=16)
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


def test_a_ratio_is_the_median_of_what_each_round_gave() -> None:
    above = [round_of(1.0, wall=wall) for wall in (1.0, 2.0, 10.0)]
    below = [round_of(1.0, wall=wall) for wall in (2.0, 4.0, 5.0)]
    assert paired_ratio(above, below, lambda one: one.tokens_per_second) == 2.0


def test_a_step_lasts_as_long_as_tokens_are_apart_while_all_requests_generate() -> None:
    early = Answer(9.0, None, token_times=(0.0, 5.0, 5.5, 6.0, 6.5))  # its first steps computed the other one's prompt
    late = Answer(9.0, None, token_times=(5.0, 5.5, 6.0, 6.5, 7.5))  # its last one ran alone
    assert Round(1, 1.0, [early, late], None).decode_step_seconds == 0.5


def test_every_system_has_as_many_rounds_and_another_one_begins_each_time() -> None:
    assert [item for _, item in in_turn("abc", 2)] == ["a", "b", "c", "b", "c", "a"]


def test_no_two_measured_rounds_ask_for_the_same_prompt() -> None:
    asked: list[int] = []

    def run(prompts: list[list[int]]) -> Round:
        asked.append(prompts[0][0])
        return round_of(1.0)

    calls: list[int] = []
    tested = [System(label, 0, WORKLOAD, False, run) for label in "ab"]
    rounds = take_turns(tested, 3, WIDTH, lambda line: None, between=lambda: calls.append(len(asked)))
    assert {label: len(each) for label, each in rounds.items()} == {"a": 3, "b": 3}
    assert len(set(asked)) == len(asked) == 8
    assert calls == [2, 4, 6]


def test_targets_are_met_or_missed_and_figures_without_one_are_neither() -> None:
    rows = [Row("W1", "a", 1.1, at_least(1.1)), Row("W1", "b", 0.06, at_most(0.05), "percent"), Row("W1", "c", 1.0)]
    assert [row.verdict for row in rows] == ["met", "missed", ""]
    assert [line.split()[-1] for line in list(target_lines(rows))[1:]] == ["met", "missed", "1.000"]


def test_facts_of_a_run_hold_every_round_but_no_prompts() -> None:
    facts = report.rounds_facts({"a": [round_of(1.0), round_of(2.0)]})
    assert [each["p50_seconds"] for each in facts["a"]["rounds"]] == [1.0, 2.0]
    workload = report.workload_facts(WORKLOAD)
    assert workload["num_prompt_tokens"] == 6
    assert "prompts" not in workload


def test_up_to_the_middle_leaves_the_upper_layers_out_and_samples_nothing() -> None:
    half = up_to_the_middle(extraction(1), 30)
    assert (half.layers, half.max_tokens) == ((2, 15), 0)


def test_shared_prefixes_are_the_same_for_their_continuations_and_for_no_others() -> None:
    prompts = shared_prefixes(1).prompts
    assert len(prompts) == 128
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 8
    assert len({tuple(prompt) for prompt in prompts}) == 128


def test_files_with_output_have_a_row_for_every_token_but_the_last() -> None:
    assert generation(1).rows_of([1, 2, 3]) == 3 + 127
    assert extraction(1).rows_of([1, 2, 3]) == 3


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
    """Answers completions with a file made of the prompt, and notes how many it had to answer at once."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.changed = threading.Condition()
        self.active = self.most_active = 0
        self.bodies: list[dict[str, Any]] = []
        self.status = 200


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.changed:
            self.server.bodies.append(body)
            self.server.active += 1
            self.server.most_active = max(self.server.most_active, self.server.active)
            self.server.changed.notify_all()
            self.server.changed.wait_for(lambda: len(self.server.bodies) >= WORKLOAD.concurrency)  # the first waits for a second
            self.server.active -= 1
        answer: dict[str, Any] = {"choices": []}
        if "kv_transfer_params" in body:
            path = self.server.folder / "-".join(str(token) for token in body["prompt"])
            save_file(good_file(path), path)
            answer["kv_transfer_params"] = {"hidden_states_path": str(path)}
        content, kind = json.dumps(answer).encode(), "application/json"
        if body.get("stream"):
            content, kind = self.events(answer), "text/event-stream"
        self.send_response(self.server.status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def events(self, answer: dict[str, Any]) -> bytes:
        chunks: list[dict[str, Any]] = [{"choices": [{"token_ids": ids}]} for ids in ([], [1], [2, 3])]
        lines = [b"data: " + json.dumps(chunk).encode() for chunk in (*chunks, answer)]
        return b"\n\n".join([b": keep-alive", *lines, b"data: [DONE]", b""])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server: Server, body: Callable[[Workload], Body]) -> Round:
    return run_round(f"http://127.0.0.1:{server.server_port}", WORKLOAD, PROMPTS, body(WORKLOAD))


def test_answers_come_in_the_order_of_the_prompts_and_no_more_than_asked_at_once(server: Server) -> None:
    measured = asked(server, saving_body)
    assert [answer.path for answer in measured.answers] == [server.folder / name for name in ("1-2-3", "4-5", "6")]
    assert server.most_active == 2
    assert (measured.num_prompt_tokens, measured.num_output_tokens) == (6, 3)
    assert {tuple(body["kv_transfer_params"]["layers"]) for body in server.bodies} == {(1, 2)}


def test_without_saving_nothing_is_said_about_hidden_states(server: Server) -> None:
    measured = asked(server, plain_body)
    assert [answer.path for answer in measured.answers] == [None, None, None]
    assert not any("kv_transfer_params" in body for body in server.bodies)


def test_vllm_is_asked_for_nothing_that_it_would_refuse(server: Server) -> None:
    asked(server, vllm_body)
    assert {tuple(body["kv_transfer_params"]) for body in server.bodies} == {("include_output_tokens",)}


def test_every_token_of_a_stream_has_a_time_and_its_file_is_found(server: Server) -> None:
    measured = asked(server, lambda workload: streamed(saving_body(workload)))
    assert {len(answer.token_times) for answer in measured.answers} == {3}
    assert all(answer.path is not None for answer in measured.answers)


def test_a_refused_request_ends_the_benchmark(server: Server) -> None:
    server.status = 500
    with pytest.raises(BenchmarkError, match="HTTP 500"):
        asked(server, saving_body)
