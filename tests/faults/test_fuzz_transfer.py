"""`kv_transfer_params` made by chance, against a running service: every answer is a documented one, and every file is what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from engine.saves.inspect import inspect_file
from tests.faults.children import Child, check_nothing_is_left, flags, number_from_environment, running

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_CASES = 100
CASES = number_from_environment("STRATA_FUZZ_CASES", DEFAULT_CASES)
DOCUMENT = yaml.safe_load((Path(__file__).parents[2] / "openapi.yaml").read_text(encoding="utf-8"))
DOCUMENTED = {int(status) for status in DOCUMENT["paths"]["/v1/completions"]["post"]["responses"]}
NEVER = {500, 503}
NUM_LAYERS, HIDDEN_SIZE = 6, 32
SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}

layer = st.one_of(st.integers(-NUM_LAYERS, NUM_LAYERS), st.just("norm"))
layers = st.lists(layer, min_size=1, max_size=5)


@st.composite
def spans(draw: st.DrawFn) -> list[list[int | None]]:
    """Ascending disjoint pairs within a prompt of a few tokens."""
    cuts = sorted(draw(st.sets(st.integers(0, 8), min_size=2, max_size=6)))
    pairs: list[list[int | None]] = [[start, end] for start, end in zip(cuts[::2], cuts[1::2], strict=False)]
    if draw(st.booleans()):
        pairs[-1][1] = None
    return pairs


numbers = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.lists(st.booleans(), min_size=1, max_size=20),
)
names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=20)
VALID: dict[str, st.SearchStrategy[Any]] = {
    "layers": layers,
    "include_output_tokens": st.booleans(),
    "include_last_token": st.booleans(),
    "positions": st.one_of(st.sampled_from(["all", "last"]), spans(), st.just([[-3, None]])),
    "pooling": st.sampled_from([None, "mean"]),
    "dtype": st.sampled_from(["auto", *SAFETENSORS]),
    "tensors": st.dictionaries(names, numbers, max_size=3),
    "metadata": st.dictionaries(names, st.text(st.characters(codec="utf-8"), max_size=50), max_size=3),
    "wait": st.sampled_from([True, True, False]),
    "on_conflict": st.sampled_from(["error", "replace"]),
    "idempotency_key": st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    "extract": st.sampled_from([True, None]),
    "ttl_seconds": st.floats(60, 1e6),
    "hidden_states_path": st.builds("{}/{}.safetensors".format, st.sampled_from(["a", "b/c", "é"]), st.integers(0, 40)),
}
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=20)
    | st.sampled_from(["all", "..", "\ud800"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=8), inner, max_size=4),
    max_leaves=8,
)
valid_params = st.fixed_dictionaries({}, optional=VALID)
paths = st.one_of(
    st.text(st.characters(), max_size=30), st.lists(st.sampled_from(["..", ".", "a", "/", "", "x.lock", "\0", "~"])).map("/".join)
)
odd_fields: dict[str, st.SearchStrategy[Any]] = {name: st.one_of(good, json_values) for name, good in VALID.items()}
odd_fields |= {"hidden_states_path": st.one_of(VALID["hidden_states_path"], paths, json_values), "do_remote_decode": json_values}
odd_params = st.one_of(
    st.fixed_dictionaries({}, optional=odd_fields), st.fixed_dictionaries({}, optional=odd_fields | {"Layers": json_values}), json_values
)
prompts = st.one_of(
    st.lists(st.integers(0, 255), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=10), min_size=1, max_size=3),
)
bodies = st.fixed_dictionaries(
    {"prompt": prompts, "max_tokens": st.integers(0, 12)},
    optional={"n": st.integers(1, 3), "temperature": st.sampled_from([0, 1]), "stop_token_ids": st.lists(st.integers(0, 255), max_size=3)},
)
FUZZ = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    derandomize=CASES <= DEFAULT_CASES,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def child(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    folder = tmp_path_factory.mktemp("fuzz")
    with running(flags(model_folder, folder / "saves", folder / "state", "--min-free-bytes", "0")) as made:
        yield made
        made.settled()
        check_nothing_is_left(folder / "saves")
        made.service.stop()
        assert "Traceback" not in made.service.tail()


def is_mean_of_nothing(params: object, answer: dict[str, Any]) -> bool:
    """A text that ends before the first of its positions is the one thing that only its end can refuse."""
    pooled = isinstance(params, dict) and params.get("pooling") == "mean" and isinstance(params.get("positions"), list)
    return pooled and answer["error"]["code"] == "out_of_range" and "no position was kept" in answer["error"]["message"]


def post(child: Child, body: dict[str, Any], params: object) -> tuple[int, dict[str, Any]]:
    """The answer to a body that may hold what httpx would not encode."""
    content = json.dumps(body | {"return_token_ids": True, "kv_transfer_params": params})
    response = child.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    answer: dict[str, Any] = response.json()
    assert response.status_code in DOCUMENTED - NEVER or is_mean_of_nothing(params, answer), response.text
    event(f"status {response.status_code}")
    if response.status_code >= 400:
        assert set(answer["error"]) >= {"message", "type", "param", "code"}
        assert "Traceback" not in response.text
    return response.status_code, answer


def positions_of(params: dict[str, Any], num_rows: int) -> list[int]:
    """Which rows are kept, out of the contract's words."""
    wanted = params.get("positions") or "all"
    if wanted == "all":
        return list(range(num_rows))
    if wanted == "last":
        return [num_rows - 1]
    kept = []
    for start, end in wanted:
        first = start if start >= 0 else num_rows + start
        last = num_rows if end is None else end if end >= 0 else num_rows + end
        kept += range(max(first, 0), min(last, num_rows))
    return kept


def rows_of(choice: dict[str, Any], params: dict[str, Any]) -> int:
    """How many positions there are to choose from."""
    prompt, output = len(choice["prompt_token_ids"]), len(choice["token_ids"])
    if params.get("include_last_token"):
        return prompt + output
    return prompt + max(0, output - 1) if params.get("include_output_tokens") else prompt


def saved(child: Child, choice: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """The record of a choice once it has ended, and its file: None where a later save has taken its name."""
    record: dict[str, Any] = child.client.get(f"/saves/{choice['kv_transfer_params']['save_id']}", params={"wait": 60}).json()
    assert record["status"] == "completed", record
    path = Path(record["hidden_states_path"])
    report = inspect_file(path)
    assert report.ok, report.problems
    assert report.header is not None
    return record, path if report.header.metadata["save_id"] == record["id"] else None


def check_file(path: Path, record: dict[str, Any], choice: dict[str, Any], params: dict[str, Any], num_layers: int) -> None:
    """The file holds what was asked for."""
    kept = positions_of(params, rows_of(choice, params))
    fed = [*choice["prompt_token_ids"], *choice["token_ids"]]
    with safe_open(path, "np") as file:
        states, names = file.get_slice("hidden_states"), set(file.keys())
        assert states.get_shape() == record["shape"] == [1 if params.get("pooling") else len(kept), num_layers, HIDDEN_SIZE]
        assert states.get_dtype() == SAFETENSORS[record["dtype"]]
        assert file.get_tensor("token_ids").tolist() == [fed[position] for position in kept]
        assert ("positions" in names) or kept == list(range(rows_of(choice, params)))
        if "positions" in names:
            assert file.get_tensor("positions").tolist() == kept
        for name, values in params.get("tensors", {}).items():
            assert file.get_tensor(name).tolist() == [int(value) if isinstance(value, bool) else value for value in values]
        metadata = file.metadata()
    assert {name: metadata[f"user.{name}"] for name in params.get("metadata", {})} == params.get("metadata", {})


def num_layers_of(child: Child, params: dict[str, Any]) -> int:
    ids = params.get("layers") or child.client.get("/v1/models").json()["data"][0]["default_layers"]
    return len({value + NUM_LAYERS + 1 if isinstance(value, int) and value < 0 else value for value in ids})


@FUZZ
@given(bodies, valid_params)
def test_files_of_valid_parameters_hold_what_was_asked_for(child: Child, body: dict[str, Any], params: dict[str, Any]) -> None:
    status, answer = post(child, body, params)
    # Positions outside the text, a path for several files, and names that are taken are all there is to refuse.
    assert status in (200, 400, 409, 500), answer
    if status != 200:
        return
    for choice in answer["choices"]:
        record, path = saved(child, choice)
        if path is not None:
            check_file(path, record, choice, params, num_layers_of(child, params))


@FUZZ
@given(bodies, odd_params)
def test_whatever_the_parameters_are_the_answer_is_documented_and_files_are_sound(
    child: Child, body: dict[str, Any], params: object
) -> None:
    status, answer = post(child, body, params)
    if status in (200, 202):
        for choice in answer["choices"]:
            if "kv_transfer_params" in choice:
                saved(child, choice)
