"""Header space, the rare move of rows that were written too early, and what a writer thread may take of the processor."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from engine.device.threads import keep_to_one_compute_thread
from engine.saves.file import PartFile
from engine.saves.header import read_header
from engine.saves.inspect import inspect_file
from engine.saves.layout import data_start_for
from engine.saves.spec import ClientTensor
from engine.saves.writer import SaveWriter

if TYPE_CHECKING:
    from tests.unit.saves.conftest import Bench


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Sizes and distances of the moves that were made."""
    made: list[tuple[int, int]] = []
    real_move = PartFile.move

    def move(self: PartFile, start: int, size: int, by: int) -> None:
        made.append((size, by))
        real_move(self, start, size, by)

    monkeypatch.setattr(PartFile, "move", move)
    return made


@pytest.mark.parametrize("header_bytes", range(100, 117))
@pytest.mark.parametrize("hidden_bytes", [0, 2, 6, 8, 1001])
def test_tensors_after_the_hidden_states_start_at_a_multiple_of_eight(header_bytes: int, hidden_bytes: int) -> None:
    start = data_start_for(header_bytes, hidden_bytes)
    assert (start + hidden_bytes) % 8 == 0
    assert 0 <= start - 8 - header_bytes < 8


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("known", [True, False])
def test_rows_move_only_where_their_number_was_unknown_and_odd(
    make_bench: "Callable[..., Bench]", moves: list[tuple[int, int]], count: int, known: bool
) -> None:
    bench = make_bench(width=5, dtype=torch.bfloat16)
    rows = bench.rows(count, layers=1)
    spec = bench.spec(bench.target(), layers=(4,), dtype="bfloat16")
    bench.save_all(rows, bench.begin(spec, num_rows=count if known else None, max_rows=100), end_later=True)
    assert bench.wait_for_end().status == "completed"
    assert torch.equal(bench.read().tensors["hidden_states"], rows)
    missing = -count * 10 % 8
    assert moves == ([(count * 10, missing)] if missing and not known else [])
    bench.close()


def test_a_long_move_is_made_in_pieces(make_bench: "Callable[..., Bench]", moves: list[tuple[int, int]]) -> None:
    bench = make_bench(page_size=528, width=1023, dtype=torch.bfloat16)
    rows = bench.rows(1301, layers=1)
    job = bench.begin(bench.spec(bench.target(), layers=(4,), dtype="bfloat16"), num_rows=None, max_rows=5000)
    bench.save_all(rows, job, step=500, end_later=True)
    assert bench.wait_for_end().status == "completed"
    assert moves == [(1301 * 2046, 2)]
    assert torch.equal(bench.read().tensors["hidden_states"], rows)
    bench.close()


def test_a_header_that_outgrows_its_room_moves_the_rows(bench: "Bench", moves: list[tuple[int, int]]) -> None:
    rows = bench.rows(2000)
    tensors = {f"tensor {number}": ClientTensor("uint8", [1]) for number in range(10)}
    job = bench.begin(bench.spec(bench.target(), tensors=tensors), num_rows=None, max_rows=1)
    bench.save_all(rows, job, step=500, end_later=True)
    assert bench.wait_for_end().status == "completed"
    assert len(moves) == 1
    assert torch.equal(bench.read().tensors["hidden_states"], rows)
    assert inspect_file(bench.folder / "a.safetensors").ok


def test_a_save_of_no_rows_is_a_file_without_rows(bench: "Bench") -> None:
    bench.save_all(bench.rows(0), bench.begin(bench.spec(bench.target()), num_rows=None, max_rows=10))
    event = bench.wait_for_end()
    assert event.file is not None
    assert event.file.shape == (0, 2, 8)
    assert bench.read().tensors["hidden_states"].shape == (0, 2, 8)


def test_header_space_does_not_depend_on_how_long_the_save_became(bench: "Bench") -> None:
    starts = set()
    for count in (1, 10, 700):
        spec = bench.spec(bench.target(f"{count}"), save_id=f"{count:3}")
        bench.save_all(bench.rows(count), bench.begin(spec, num_rows=None, max_rows=1000), end_later=True)
        assert bench.wait_for_end(f"{count:3}").status == "completed"
        with (bench.folder / f"{count}").open("rb") as file:
            starts.add(read_header(file.fileno()).data_start)
    assert len(starts) == 1


def test_writer_threads_compute_alone_and_leave_the_others_as_they_are() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def work() -> None:
        keep_to_one_compute_thread()
        seen.append(torch.get_num_threads())

    for target in (work, lambda: seen.append(torch.get_num_threads())):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert seen == [1, before]
    assert torch.get_num_threads() == before


def test_idle_waits_end_when_the_time_is_up(bench: "Bench") -> None:
    writer = SaveWriter(bench.pages, lambda _event: None, threads=0)
    job = writer.begin(bench.spec(bench.target()), num_rows=None, max_rows=1)
    assert writer.wait_idle(0.01)
    chunk = bench.chunk(bench.rows(1), 0)
    job.append(chunk)
    assert not writer.wait_idle(0.01)
    assert writer.queue_depth == 1
    thread = threading.Thread(target=chunk.release, name="save-writer-none")
    thread.start()
    thread.join()
