"""How a step goes to a device: its arrays in one transfer, its rows off before its tokens are chosen, all on one stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.capture.sink import StagedSink
from engine.device.packing import Packing, arrays_to_device
from engine.device.resolve import use_device
from engine.device.streams import HostCopies, HostStream, SingleStreamCheck
from engine.execution import runner
from engine.request import SamplingParams
from engine.sampling.sampler import SampledRow, SamplerOutput
from tests.unit.decode_bench import CPU, DecodeBench, FakeRecorder
from tests.unit.deferred_stream import DeferredStream

GPU = torch.device("cuda", 1)


def test_arrays_of_all_kinds_come_out_of_one_piece_of_memory_as_they_went_in() -> None:
    arrays: list[Any] = [
        np.arange(5, dtype=np.int64),
        np.zeros(0, np.int32),
        np.array([[1.5, -2.0]], np.float32),
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
        np.array([[0.1], [0.2]], np.float64),
    ]
    packing = Packing(arrays)
    memory = torch.empty(packing.num_bytes, dtype=torch.uint8)
    packing.write(memory)
    for array, view in zip(arrays, packing.views(memory), strict=True):
        assert view.dtype == torch.from_numpy(array).dtype
        assert torch.equal(view, torch.from_numpy(array.copy()))
        assert not view.numel() or view.data_ptr() % 8 == 0


def test_on_a_processor_nothing_is_copied() -> None:
    array = np.arange(3)
    [view] = arrays_to_device([array], CPU)
    array[1] = 7
    assert view.tolist() == [0, 7, 2]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_sends_its_arrays_in_one_transfer(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    transfers: list[int] = []

    def counted(arrays: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
        transfers.append(len(arrays))
        return arrays_to_device(arrays, device)

    monkeypatch.setattr(runner, "arrays_to_device", counted)
    stream = DeferredStream()
    bench = DecodeBench(recorder=FakeRecorder() if graphs else None, overlap=True, stream=stream)
    for number in range(4):  # some with rows to capture, so that those of a layer don't stand side by side
        layers = (0, 2, 4, "norm") if number % 2 else None
        bench.add(f"r{number}", [1, 2, 3, number], SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=1), layers)  # type: ignore[arg-type]
    bench.run()
    assert len(transfers) == len(bench.listener.outputs["r0"]) == 4
    assert max(transfers) > 6


def test_captured_rows_are_sent_off_before_tokens_are_chosen_or_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = DeferredStream()
    bench = DecodeBench(sink=lambda rows: StagedSink(rows, 2000, CPU, stream=stream), overlap=True, stream=stream)
    on_their_way: list[list[torch.dtype]] = []
    sampler = bench.core._parts.sampler
    choose = sampler.launch

    def chosen(logits: torch.Tensor, rows: Sequence[SampledRow]) -> SamplerOutput:
        on_their_way.append([copy.target.dtype for copy in stream.pending])
        return choose(logits, rows)

    monkeypatch.setattr(sampler, "launch", chosen)
    bench.add("a", [1, 2, 3], SamplingParams(max_tokens=3, temperature=0.0), (0, 4))
    bench.step()
    assert on_their_way == [[torch.float32]]
    assert [copy.target.dtype for copy in stream.pending] == [torch.float32, torch.int64]
    assert not stream.num_waits
    bench.run()


def test_copies_of_a_step_are_all_waited_for_and_their_sources_live_until_then() -> None:
    stream = DeferredStream()
    copies = HostCopies(stream)
    targets = [copies.start(torch.full((2,), float(number))) for number in range(3)]
    assert all(target.isnan().all() for target in targets)
    copies.wait()
    assert [target.tolist() for target in targets] == [[0, 0], [1, 1], [2, 2]]
    assert HostCopies(HostStream()).start(torch.ones(1)).tolist() == [1]


def test_steps_on_a_second_stream_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["one"]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: current[0])
    stream = SingleStreamCheck(GPU)
    stream.check()
    stream.check()
    current[0] = "another"
    with pytest.raises(AssertionError, match="more than one stream"):
        stream.check()
    SingleStreamCheck(CPU).check()


def test_a_thread_works_on_the_device_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    use_device(CPU)
    use_device(GPU)
    assert used == [GPU]


def test_a_step_that_gives_no_token_is_not_over_before_the_device_is_past_it() -> None:
    """Else its blocks went to others, the time it took were the host's alone, and the host launched a long prompt's steps all at once."""
    stream = DeferredStream()
    bench = DecodeBench(sink=lambda rows: StagedSink(rows, 2000, CPU), overlap=True, stream=stream)
    bench.add("prompt", list(range(90)) * 5, SamplingParams(max_tokens=0), (1,))
    bench.step()
    assert len(bench.core._in_flight) == len(stream.pending) == 1
    for number in range(1, 3):
        bench.step()
        assert (stream.num_waits, len(stream.pending)) == (number, 1)
    bench.run()
    assert len(bench.jobs["prompt"].rows) == 450
