"""The benchmark of the edge reads whole answers, counts full steps only, and runs from end to end."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.client import BenchmarkError
from benchmarks.edge import ALONE, PLAIN, STREAMED, Decoding, edge_lines, measure_edge, measure_streams, stream_lines
from benchmarks.edge_load import post, run_load
from benchmarks.edge_model import write_small_model
from benchmarks.edge_service import Step
from service.text.tokenizer import Tokenizer

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\n0\r\n\r\n"
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def answering(*answers: bytes, piece: int) -> Iterator[int]:
    """A server of one connection that sends these answers in pieces of so many bytes; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            connection, _ = listening.accept()
            with connection:
                for answer in answers:
                    connection.recv(1 << 16)
                    for start in range(0, len(answer), piece):
                        connection.sendall(answer[start : start + piece])

        thread = threading.Thread(target=run)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_whole_and_chunked_answers_are_read_to_their_end(piece: int) -> None:
    with answering(WHOLE, CHUNKED, WHOLE, piece=piece) as port:
        replies = run_load(port, [post({})] * 3, concurrency=1)
    assert [reply.content for reply in replies] == [WHOLE, CHUNKED, WHOLE]
    assert [reply.events for reply in replies] == [0, 2, 0]


def test_a_refusal_ends_the_load() -> None:
    with answering(REFUSED, piece=1000) as port, pytest.raises(BenchmarkError, match="429"):
        run_load(port, [post({})], concurrency=1)


def test_a_connection_that_closes_early_ends_the_load() -> None:
    with answering(WHOLE[:-1], piece=1000) as port, pytest.raises(BenchmarkError, match="closed"):
        run_load(port, [post({})], concurrency=1)


def test_steps_with_a_prefill_or_with_fewer_requests_are_not_counted() -> None:
    steps = [Step(9, 2, 50.0, 0.0), Step(2, 2, 1.0, 10.0), Step(2, 2, 3.0, 14.0), Step(1, 1, 70.0, 20.0)]
    decoding = Decoding(PLAIN, steps, tokens_per_step=2, loop_seconds=8.0, all_steps=4, events=0)
    assert (decoding.step_seconds, decoding.period_seconds, decoding.loop_seconds_per_step) == (2.0, 4.0, 2.0)


def test_ratios_are_taken_within_a_round() -> None:
    seconds = {ALONE: (1.0, 10.0), PLAIN: (2.0, 10.0), STREAMED: (3.0, 10.0)}
    rounds = [
        Decoding(label, [Step(2, 2, each, 0.0), Step(2, 2, each, each)], 2, 0.0, 2, 0) for label, both in seconds.items() for each in both
    ]
    lines = [line.split()[-3:] for line in list(stream_lines(rounds))[2:]]
    assert lines == [["0.750", "0.500", "1.000"], ["1.000", "1.000", "1.000"], ["1.250", "1.000", "1.500"]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model with one token per byte."""
    source, folder = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(source / "tokenizer.json"))
    write_small_model(folder, 8000, source, width=64, layers=1)
    return folder


def test_both_parts_run_from_end_to_end(model: Path, tmp_path: Path) -> None:
    edges = list(measure_edge(model, tmp_path, Tokenizer.from_folder(model), num_requests=2))
    assert [len(each.round.answers) for each in edges] == [2] * 12
    assert len(list(edge_lines(edges))) == 14
    rounds = list(measure_streams(model, tmp_path, streams=2, max_tokens=40, rounds=1))
    assert [each.label for each in rounds] == [ALONE, PLAIN, STREAMED]
    assert [each.events > 0 for each in rounds] == [False, False, True]
