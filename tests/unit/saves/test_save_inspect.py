"""The inspector finds what is wrong with a file; files of the writer have nothing wrong."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from engine.saves.header import read_header
from engine.saves.inspect import inspect_file
from engine.saves.selection import RowSelection
from engine.saves.writer import SaveEnd

if TYPE_CHECKING:
    from tests.unit.saves.conftest import Bench

Tensors = dict[str, torch.Tensor]
Metadata = dict[str, str]


@pytest.fixture
def good(bench: "Bench") -> Path:
    """A float8 file of rows 2 … 6 of a sequence of nine."""
    spec = bench.spec(bench.target(), rows=RowSelection(((2, 7),)), dtype="float8_e4m3fn")
    job = bench.begin(spec, num_rows=5, max_rows=5)
    job.append(bench.chunk(bench.rows(5), 2))
    job.finish(SaveEnd([9, 8, 7, 6, 5], [2, 3, 4, 5, 6], 9, 4))
    assert bench.wait_for_end().status == "completed"
    return bench.folder / "a.safetensors"


def problems_after(path: Path, bench: "Bench", change: Callable[[Tensors, Metadata], object]) -> tuple[str, ...]:
    saved = bench.read(path.name)
    change(saved.tensors, saved.metadata)
    other = path.with_name("b.safetensors")
    save_file(saved.tensors, other, saved.metadata)
    return inspect_file(other).problems


def test_a_file_of_the_writer_has_no_problems(good: Path) -> None:
    report = inspect_file(good)
    assert report.ok
    assert report.header is not None
    assert [tensor.entry.name for tensor in report.header.tensors] == ["hidden_states", "token_ids", "positions", "hidden_states_scales"]
    assert report.header.metadata["save_id"] == "id"
    assert report.size == good.stat().st_size


def test_the_header_alone_can_be_read_by_descriptor(good: Path) -> None:
    with good.open("rb") as file:
        assert read_header(file.fileno()).metadata["save_id"] == "id"


FLOAT8_NAN = 0x7F

CHANGES: dict[str, Callable[[Tensors, Metadata], object]] = {
    "hidden_states [rows, layers, width]": lambda tensors, _: tensors.pop("hidden_states"),
    "token_ids [tokens] int64 is missing": lambda tensors, _: tensors.pop("token_ids"),
    "hidden_states has 5 rows for 4": lambda tensors, _: tensors.update(token_ids=tensors["token_ids"][:4].clone()),
    "positions is not int64 of the 5": lambda tensors, _: tensors.update(positions=tensors["positions"][:4].clone()),
    "come only together": lambda tensors, _: tensors.pop("hidden_states_scales"),
    "is not float32 [5, 1, 1]": lambda tensors, _: tensors.update(hidden_states_scales=torch.ones(5)),
    "scales holds a value that is not finite at [3, 0, 0]": lambda tensors, _: tensors["hidden_states_scales"][3].fill_(float("inf")),
    "not finite at [4, 1, 2]": lambda tensors, _: tensors["hidden_states"].view(torch.uint8)[4, 1, 2].fill_(0x7F),
    "tokens_sha256 is not that of": lambda tensors, _: tensors["token_ids"][0].fill_(1),
    "positions are not ascending": lambda tensors, _: tensors["positions"][1].fill_(2),
    "positions go up to 9": lambda tensors, _: tensors["positions"][4].fill_(9),
    "lacks model, created": lambda _, metadata: [metadata.pop(key) for key in ("model", "created")],
    "the format is 'x'": lambda _, metadata: metadata.update(format="x"),
    "dtype float16 is not that": lambda _, metadata: metadata.update(dtype="float16"),
    "for 3 layers of width 8": lambda _, metadata: metadata.update(layers='[1, 2, "norm"]'),
    "for 2 layers of width 7": lambda _, metadata: metadata.update(hidden_size="7"),
    "layers is not a JSON list": lambda _, metadata: metadata.update(layers="[1, 2"),
    "final_norm is false": lambda _, metadata: metadata.update(final_norm="false"),
    "is not a number": lambda _, metadata: metadata.update(num_tokens="many"),
    "num_prompt_tokens 10 is more": lambda _, metadata: metadata.update(num_prompt_tokens="10"),
    "5 token_ids for num_tokens 4": lambda _, metadata: metadata.update(num_tokens="4"),
    "without positions, for num_tokens 9": lambda tensors, _: tensors.pop("positions"),
}


@pytest.mark.parametrize("expected", CHANGES)
def test_every_broken_promise_is_found(good: Path, bench: "Bench", expected: str) -> None:
    assert any(expected in problem for problem in problems_after(good, bench, CHANGES[expected]))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "ends within its header"),
        (b"\xff" * 64, "bytes long"),
        ((50).to_bytes(8, "little") + b"{}", "ends within its header"),
        ((4).to_bytes(8, "little") + b"nope", "not JSON"),
        ((4).to_bytes(8, "little") + b"[12]", "not a JSON object"),
        ((13).to_bytes(8, "little") + b'{"a":1,"a":2}', "occurs twice"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "entry of a is malformed"),
        ((22).to_bytes(8, "little") + b'{"__metadata__":{"a":1', "not JSON"),
        ((24).to_bytes(8, "little") + b'{"__metadata__":{"a":1}}', "not an object of strings"),
        ((55).to_bytes(8, "little") + b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}' + b" ", "not expected"),
        ((55).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', "not expected"),
        ((55).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-1,3]}}', "not expected"),
    ],
)
def test_what_is_no_safetensors_file_is_said_to_be_none(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    report = inspect_file(path)
    assert report.header is None
    assert expected in report.problems[0]


def rewrite(path: Path, change: Callable[[dict[str, dict[str, object]]], object], tail: bytes = b"") -> tuple[str, ...]:
    """Changes the header, keeping its length, and appends `tail`."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    path.write_bytes(
        data[:8] + json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length) + data[8 + length :] + tail
    )
    return inspect_file(path).problems


def test_holes_overlaps_and_wrong_sizes_are_found(good: Path) -> None:
    assert any("the file at" in problem for problem in rewrite(good, lambda header: None, tail=b"x"))
    os.truncate(good, good.stat().st_size - 2)
    assert any("the file at" in problem for problem in rewrite(good, lambda header: None))


def test_a_tensor_of_another_size_than_its_shape_is_found(good: Path) -> None:
    problems = rewrite(good, lambda header: header["token_ids"].update(shape=[6]))
    assert any("token_ids has 40 bytes, but its shape and dtype make 48" in problem for problem in problems)


def test_a_misaligned_tensor_is_found(good: Path) -> None:
    data = good.read_bytes()
    length = int.from_bytes(data[:8], "little") + 1
    good.write_bytes(length.to_bytes(8, "little") + data[8 : 7 + length] + b" " + data[7 + length :])
    assert any("not a multiple of its item size" in problem for problem in inspect_file(good).problems)
