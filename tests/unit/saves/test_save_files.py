"""What is in a file: any chunking, any interleaving of saves, any dtype, always the right bytes."""

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.saves.inspect import inspect_file
from engine.saves.selection import ALL_ROWS, RowSelection
from engine.saves.spec import ClientTensor
from engine.saves.writer import SaveEnd

if TYPE_CHECKING:
    from tests.unit.saves.conftest import Bench, SavedTensors

ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "U8": 1}
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


def float8_values() -> np.ndarray:
    """All finite magnitudes of e4m3, by the definition of the format: bias 7, no infinities, 0x7f is NaN. The index is the code."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def nearest_float8(values: np.ndarray) -> np.ndarray:
    """Codes of the nearest values, ties to the even code; the sign is bit 7."""
    table = float8_values()
    distance = np.abs(np.abs(values.astype(np.float64))[..., None] - table)
    best = distance.min(axis=-1, keepdims=True)
    tied = distance == best
    codes = tied.argmax(axis=-1)
    upper = len(table) - 1 - tied[..., ::-1].argmax(axis=-1)
    codes = np.where((codes % 2 == 1) & (upper > codes), upper, codes)
    return (codes | (np.signbit(values) << 7)).astype(np.uint8)


def stored_bits(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 rows in `dtype`, as unsigned integers, rounded to the nearest with ties to even; written without torch."""
    if dtype == "float32":
        return rows.view(np.uint32)
    if dtype == "float16":
        return rows.astype(np.float16).view(np.uint16)
    if dtype == "bfloat16":
        bits = rows.view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return nearest_float8(rows / scales_of(rows))


def scales_of(rows: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(rows).max(axis=(1, 2), keepdims=True) / np.float32(448), np.float32(1e-12)).astype(np.float32)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    kind = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.dtype.itemsize]
    return tensor.view(kind).numpy()


def check_layout(path: Path) -> None:
    """By the format's own definition: no holes, every tensor at a multiple of its item size."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header.pop("__metadata__")
    data_start = end
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        start, stop = (data_start + offset for offset in entry["data_offsets"])
        assert start == end
        assert start % ITEM_SIZES[entry["dtype"]] == 0
        assert stop - start == int(np.prod(entry["shape"])) * ITEM_SIZES[entry["dtype"]]
        end = stop
    assert end == len(data)


@st.composite
def selections(draw: st.DrawFn, total: int) -> RowSelection:
    if draw(st.booleans()):
        return ALL_ROWS
    bounds = sorted(draw(st.sets(st.integers(0, total), min_size=2, max_size=min(6, total + 1))))
    return RowSelection(tuple(itertools.pairwise(bounds))[::2])


@st.composite
def saves(draw: st.DrawFn, width: int) -> dict[str, object]:
    """One save, and how its rows are cut into chunks."""
    total = draw(st.integers(1, 60))
    selection = draw(selections(total))
    cuts = draw(st.sets(st.integers(0, total)))
    ranges = []
    for low, high in selection.ranges(total):
        edges = sorted({low, high, *(cut for cut in cuts if low < cut < high)})
        ranges += list(itertools.pairwise(edges))
    ends = draw(st.sets(st.integers(1, len(ranges)))) if ranges else set()
    chunks = [ranges[low:high] for low, high in itertools.pairwise(sorted({0, len(ranges), *ends}))]
    layers = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 2**31))
    rows = np.random.default_rng(seed).standard_normal((total, layers, width), dtype=np.float32)
    rows *= np.float32(10) ** draw(st.integers(-6, 3))
    return {
        "rows": rows,
        "layers": (1, 5, "norm")[-layers:],
        "selection": selection,
        "chunks": chunks,
        "dtype": draw(st.sampled_from(list(TORCH_DTYPES))),
        "pooling": draw(st.sampled_from([None, None, "mean"])),
        "known": draw(st.sampled_from(["nothing", "rows", "end"])),
        "spare": draw(st.integers(0, 10_000)),
        "num_prompt_tokens": draw(st.integers(1, total)),
        "tensors": draw(st.sampled_from([{}, {"mask": ClientTensor("uint8", [1, 0, 1])}, CLIENT_TENSORS])),
    }


CLIENT_TENSORS = {
    "empty": ClientTensor("float32", []),
    "mask": ClientTensor("uint8", [1] * 5),
    "weights": ClientTensor("float32", [0.5, -2.0, 0.1]),
    "numbers": ClientTensor("int64", [-1, 2**62]),
}


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_chunks_of_any_saves_in_any_order_make_the_right_bytes(make_bench: "Callable[..., Bench]", data: st.DataObject) -> None:
    width = data.draw(st.sampled_from([1, 3, 5, 8, 66]), "width")
    compute = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), "compute dtype")
    page_size = data.draw(st.sampled_from([1, 4, 22, 528]), "page size")
    threads = data.draw(st.integers(1, 3), "threads")
    wanted = data.draw(st.lists(saves(width), min_size=1, max_size=3), "saves")
    bench = make_bench(page_size=page_size, width=width, dtype=compute, threads=threads, durability="none", checksum="sha256")
    for save in wanted:
        # What the compute dtype can't hold was never in the pages.
        save["rows"] = torch.from_numpy(save["rows"]).to(compute)
    run(bench, wanted, data)
    for number, save in enumerate(wanted):
        event = bench.wait_for_end(str(number))
        assert event.status == "completed", event.error
        assert bench.statuses(str(number)) == ["running", "writing", "completed"]
        check_save(bench, save, number)
        path = bench.folder / f"{number}.safetensors"
        assert event.file is not None
        assert event.file.checksum == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
        assert event.file.bytes == path.stat().st_size
        assert (event.file.device, event.file.inode) == (path.stat().st_dev, path.stat().st_ino)
    bench.close()
    assert len(bench.names()) == len(wanted)


def run(bench: "Bench", wanted: list[dict], data: st.DataObject) -> None:
    """Hands in the chunks of all saves, each save's in order, and the saves' in turns."""
    jobs, steps = [], []
    for number, save in enumerate(wanted):
        kept = sum(high - low for low, high in save["selection"].ranges(len(save["rows"])))
        target = bench.target(f"{number}.safetensors")
        names = {key: save[key] for key in ("layers", "dtype", "pooling", "tensors")}
        spec = bench.spec(target, rows=save["selection"], save_id=str(number), **names)
        num_rows, end = None if save["known"] == "nothing" else kept, end_of(save) if save["known"] == "end" else None
        jobs.append(bench.begin(spec, num_rows=num_rows, max_rows=kept + save["spare"], end=end))
        steps += [number] * (len(save["chunks"]) + 1)
    progress = [iter(save["chunks"]) for save in wanted]
    for number in data.draw(st.permutations(steps), "order") if len(wanted) > 1 else steps:
        save, part = wanted[number], next(progress[number], None)
        if part is None:
            jobs[number].finish(end_of(save))
        else:
            positions = [position for low, high in part for position in range(low, high)]
            jobs[number].append(bench.chunk_of(save["rows"][positions], part))


def positions_of(save: dict) -> list[int]:
    return [position for low, high in save["selection"].ranges(len(save["rows"])) for position in range(low, high)]


def end_of(save: dict) -> SaveEnd:
    total, positions = len(save["rows"]), positions_of(save)
    tokens = [1000 + position for position in positions]
    return SaveEnd(tokens, None if len(positions) == total else positions, total, save["num_prompt_tokens"])


def check_save(bench: "Bench", save: dict, number: int) -> None:
    name = f"{number}.safetensors"
    check_layout(bench.folder / name)
    assert inspect_file(bench.folder / name).problems == ()
    saved, end = bench.read(name), end_of(save)
    assert saved.tensors["token_ids"].tolist() == list(end.token_ids)
    if end.positions is None:
        assert "positions" not in saved.tensors
    else:
        assert saved.tensors["positions"].tolist() == list(end.positions)
    for key, tensor in save["tensors"].items():
        assert saved.tensors[key].dtype == getattr(torch, tensor.dtype)
        np.testing.assert_allclose(saved.tensors[key].numpy(), np.array(tensor.values), rtol=1e-7)
    check_states(saved, save)
    assert saved.metadata.items() >= {"num_tokens": str(end.num_tokens), "dtype": save["dtype"], "save_id": str(number)}.items()
    assert saved.metadata["num_prompt_tokens"] == str(end.num_prompt_tokens)
    assert saved.metadata["user.note"] == 'quotes " and ünïcode 😀'
    packed = b"".join(token.to_bytes(8, "little", signed=True) for token in end.token_ids)
    assert saved.metadata["tokens_sha256"] == hashlib.sha256(packed).hexdigest()


def check_states(saved: "SavedTensors", save: dict) -> None:
    states = saved.tensors["hidden_states"]
    assert states.dtype == TORCH_DTYPES[save["dtype"]]
    kept = save["rows"][positions_of(save)].float().numpy()
    if save["pooling"]:
        mean = kept.astype(np.float64).mean(axis=0, keepdims=True)
        tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3, "float8_e4m3fn": 0.07}[save["dtype"]]
        scale = saved.tensors.get("hidden_states_scales", torch.ones(1)).numpy()
        # Sums cancel, so the error is bounded by what was summed up, and below float16's and float8's smallest steps there is nothing.
        largest = np.abs(kept).max()
        np.testing.assert_allclose(states.float().numpy() * scale, mean, atol=tolerance * largest + 1e-7, rtol=tolerance)
        return
    np.testing.assert_array_equal(bits_of(states), stored_bits(kept, save["dtype"]))
    if save["dtype"] == "float8_e4m3fn":
        np.testing.assert_array_equal(saved.tensors["hidden_states_scales"].numpy(), scales_of(kept))
    else:
        assert "hidden_states_scales" not in saved.tensors
