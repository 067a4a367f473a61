"""Every field of `kv_transfer_params`: what lands in the file, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaForCausalLM

if TYPE_CHECKING:
    from tests.http.conftest import Service, Services

PROMPT = list(range(40, 60))


class Saved:
    """A published file, read with the safetensors library."""

    def __init__(self, path: str) -> None:
        with safe_open(path, "pt") as file:
            self.metadata: dict[str, str] = file.metadata()
            self.tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        self.states = self.tensors["hidden_states"]
        self.token_ids = self.tensors["token_ids"].tolist()


def save(service: Service, params: dict[str, Any], **body: Any) -> tuple[dict[str, Any], Saved]:  # noqa: ANN401 - any JSON value
    """The only choice of an answer, and its file."""
    answer = service.completed(**{"prompt": PROMPT, "return_token_ids": True, "kv_transfer_params": params} | body)
    choice = answer["choices"][0]
    assert answer["kv_transfer_params"] == choice["kv_transfer_params"]
    return choice, Saved(choice["kv_transfer_params"]["hidden_states_path"])


def test_the_answer_names_the_file_and_the_file_is_there(service: Service) -> None:
    choice, saved = save(service, {})
    transfer = choice["kv_transfer_params"]
    path = Path(transfer["hidden_states_path"])
    assert transfer == {
        "hidden_states_path": str(service.root / f"{transfer['save_id']}.safetensors"),
        "save_id": path.stem,
        "status": "completed",
        "layers": [2, 3, 6],
        "dtype": "float32",
        "num_tokens": 20,
        "shape": [20, 3, 32],
        "bytes": path.stat().st_size,
        "url": f"/saves/{path.stem}/file",
    }
    assert len(transfer["save_id"]) == 32
    assert saved.token_ids == PROMPT
    assert list(saved.states.shape) == [20, 3, 32]
    assert (path.parent / f"{path.name}.lock").exists()


def test_the_rows_are_those_of_transformers(service: Service, model_folder: Path) -> None:
    choice, saved = save(service, {"layers": [0, 3, 6, "norm"], "include_output_tokens": True}, max_tokens=6, ignore_eos=True)
    fed = PROMPT + choice["token_ids"][:-1]
    assert saved.token_ids == fed
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    last: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    with torch.inference_mode():
        output = model(torch.tensor([fed]), output_hidden_states=True)
    expected = torch.stack([output.hidden_states[0][0], output.hidden_states[3][0], last[0][0], output.hidden_states[-1][0]], dim=1)
    torch.testing.assert_close(saved.states, expected, rtol=1e-4, atol=1e-4)
    assert choice["token_ids"] == output.logits[0, len(PROMPT) - 1 :].argmax(-1).tolist()


def test_the_metadata_says_where_the_rows_come_from(service: Service) -> None:
    choice, saved = save(service, {"layers": [1, "norm"], "metadata": {"set": "train", "ключ": "значение"}}, request_id="meta-1")
    metadata = saved.metadata
    expected = {
        "format": "strata.hidden_states.v1",
        "model": "tiny",
        "num_hidden_layers": "6",
        "hidden_size": "32",
        "layers": '[1, "norm"]',
        "final_norm": "true",
        "compute_dtype": "float32",
        "dtype": "float32",
        "num_prompt_tokens": "20",
        "num_tokens": "20",
        "save_id": choice["kv_transfer_params"]["save_id"],
        "request_id": "meta-1",
        "user.set": "train",
        "user.ключ": "значение",
    }
    assert metadata.items() >= expected.items()
    assert metadata["engine"].startswith("strata ")
    assert metadata["created"].endswith("Z")
    assert set(metadata) - set(expected) == {"model_revision", "layer_convention", "created", "engine", "tokens_sha256"}


def test_output_rows_are_those_of_the_tokens_that_were_fed(service: Service) -> None:
    body = {"max_tokens": 5, "ignore_eos": True}
    prompt_only = save(service, {}, **body)
    with_output = save(service, {"include_output_tokens": True}, **body)
    with_last = save(service, {"include_last_token": True}, **body)
    output = with_last[0]["token_ids"]
    assert prompt_only[1].token_ids == PROMPT
    assert with_output[1].token_ids == PROMPT + output[:-1]
    assert with_last[1].token_ids == PROMPT + output
    assert with_output[0]["kv_transfer_params"]["num_tokens"] == len(PROMPT) + len(output) - 1
    torch.testing.assert_close(with_last[1].states[:20], prompt_only[1].states, rtol=1e-4, atol=1e-4)


def test_rows_end_at_the_token_that_completed_a_stop(service: Service) -> None:
    token = save(service, {}, max_tokens=8, ignore_eos=True)[0]["token_ids"][3]
    choice, saved = save(service, {"include_output_tokens": True}, max_tokens=8, ignore_eos=True, stop_token_ids=[token])
    assert saved.token_ids == PROMPT + choice["token_ids"][:-1]


def test_layers_are_sorted_unique_and_counted_from_the_end(service: Service) -> None:
    choice, saved = save(service, {"layers": ["norm", -1, 6, 0, -6, 0]})
    assert choice["kv_transfer_params"]["layers"] == [0, 1, 6, "norm"]
    assert json.loads(saved.metadata["layers"]) == [0, 1, 6, "norm"]
    everything = save(service, {"layers": [0, 1, 2, 3, 4, 5, 6, "norm"]})[1].states
    torch.testing.assert_close(saved.states, everything[:, [0, 1, 6, 7]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("positions", "kept"),
    [
        ("all", range(20)),
        ("last", [19]),
        ([[0, None]], range(20)),
        ([[2, 5], [7, 9]], [2, 3, 4, 7, 8]),
        ([[0, 1], [-2, None]], [0, 18, 19]),
        ([[-5, -3]], [15, 16]),
    ],
)
def test_positions_choose_the_rows(service: Service, positions: object, kept: list[int]) -> None:
    everything = save(service, {})[1].states
    saved = save(service, {"positions": positions})[1]
    assert saved.token_ids == [PROMPT[index] for index in kept]
    torch.testing.assert_close(saved.states, everything[list(kept)], rtol=1e-4, atol=1e-4)
    assert ("positions" in saved.tensors) == (len(kept) < 20)
    if "positions" in saved.tensors:
        assert saved.tensors["positions"].tolist() == list(kept)


def test_positions_of_unknown_length_are_clamped_and_of_known_length_refused(service: Service) -> None:
    saved = save(service, {"positions": [[18, 90]], "include_output_tokens": True}, max_tokens=4)[1]
    assert saved.tensors["positions"].tolist()[0] == 18
    for extra in ({}, {"include_output_tokens": True}):
        error = service.refused(400, prompt=PROMPT, ignore_eos=True, kv_transfer_params={"positions": [[18, 90]], **extra})
        assert error["param"] == "kv_transfer_params.positions"
        assert "90" in error["message"]


def test_pooling_gives_one_mean_row_in_float32(service: Service) -> None:
    everything = save(service, {})[1].states
    choice, saved = save(service, {"pooling": "mean", "positions": [[2, 9]]})
    assert choice["kv_transfer_params"]["dtype"] == "float32"
    assert choice["kv_transfer_params"]["shape"] == [1, 3, 32]
    torch.testing.assert_close(saved.states[0], everything[2:9].mean(0), rtol=1e-4, atol=1e-4)
    assert save(service, {"pooling": "mean", "dtype": "bfloat16"})[1].states.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_stored_in_the_dtype_asked_for(service: Service, dtype: str) -> None:
    everything = save(service, {})[1].states
    choice, saved = save(service, {"dtype": dtype})
    assert choice["kv_transfer_params"]["dtype"] == dtype
    torch.testing.assert_close(saved.states, everything.to(getattr(torch, dtype)), rtol=1e-2, atol=1e-2)


def test_float8_rows_have_scales(service: Service) -> None:
    everything = save(service, {})[1].states
    saved = save(service, {"dtype": "float8_e4m3fn"})[1]
    scales = saved.tensors["hidden_states_scales"]
    assert list(scales.shape) == [20, 1, 1]
    torch.testing.assert_close(saved.states.float() * scales, everything, rtol=0.07, atol=0.02)


def test_client_tensors_are_stored_beside_the_states(service: Service) -> None:
    tensors = {"loss_mask": [0, 1] * 10, "weights": [0.5, 1, 2], "flags": [True, False], "large": [2**62, -1]}
    saved = save(service, {"tensors": tensors})[1]
    stored = {name: (saved.tensors[name].dtype, saved.tensors[name].tolist()) for name in tensors}
    assert stored == {
        "loss_mask": (torch.int64, [0, 1] * 10),
        "weights": (torch.float32, [0.5, 1.0, 2.0]),
        "flags": (torch.uint8, [1, 0]),
        "large": (torch.int64, [2**62, -1]),
    }


def test_a_path_may_be_relative_absolute_or_a_directory(service: Service) -> None:
    relative = service.new_path()
    assert save(service, {"hidden_states_path": f"a/b/{relative}"})[0]["kv_transfer_params"]["hidden_states_path"] == str(
        service.root / "a" / "b" / relative
    )
    absolute = str(service.root / service.new_path())
    assert save(service, {"hidden_states_path": absolute})[0]["kv_transfer_params"]["hidden_states_path"] == absolute
    for directory in ("new/", "a/b", str(service.root)):
        transfer = save(service, {"hidden_states_path": directory})[0]["kv_transfer_params"]
        assert Path(transfer["hidden_states_path"]).parent == (service.root / directory)
        assert Path(transfer["hidden_states_path"]).stem == transfer["save_id"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("", 400),
        ("a\\b", 400),
        (".hidden", 400),
        ("x.lock", 400),
        ("x.part", 400),
        ("x\x00", 400),
        ("../x", 403),
        ("/etc/x", 403),
        (5, 400),
    ],
)
def test_a_bad_path_is_refused_and_nothing_is_made(service: Service, path: object, status: int) -> None:
    before = sorted(service.root.rglob("*"))
    error = service.refused(status, kv_transfer_params={"hidden_states_path": path})
    assert error["param"] == "kv_transfer_params.hidden_states_path"
    assert sorted(service.root.rglob("*")) == before


def test_an_existing_file_is_a_conflict_unless_it_is_to_be_replaced(service: Service) -> None:
    path = service.new_path()
    save(service, {"hidden_states_path": path})
    error = service.refused(409, prompt=PROMPT, kv_transfer_params={"hidden_states_path": path})
    assert error["code"] == "path_conflict"
    replaced = save(service, {"hidden_states_path": path, "on_conflict": "replace", "layers": [1]})[1]
    assert list(replaced.states.shape) == [20, 1, 32]


def test_nothing_is_saved_unless_it_is_asked_for(service: Service) -> None:
    before = sorted(service.root.rglob("*.safetensors"))
    assert "kv_transfer_params" not in service.completed()
    assert "kv_transfer_params" not in service.completed(kv_transfer_params={"extract": False, "layers": [1]})["choices"][0]
    assert sorted(service.root.rglob("*.safetensors")) == before
    assert "kv_transfer_params" in service.completed(kv_transfer_params={"extract": True})


def test_extraction_by_default_can_be_switched_off(services: Services) -> None:
    with services.run(extract_by_default=True, layers=(1, -1)) as service:
        assert service.completed()["kv_transfer_params"]["layers"] == [1, 6]
        assert "kv_transfer_params" not in service.completed(kv_transfer_params={"extract": False})


def test_fields_of_other_servers_are_ignored(service: Service) -> None:
    save(service, {"do_remote_decode": True, "do_remote_prefill": False})


def test_without_waiting_the_answer_says_writing(service: Service) -> None:
    answer = service.completed(kv_transfer_params={"wait": False})
    transfer = answer["kv_transfer_params"]
    assert transfer["status"] in ("writing", "completed")
    assert answer["choices"][0]["text"]
    record = service.record(transfer["save_id"])
    assert record["status"] == "completed"
    assert Path(record["hidden_states_path"]).exists()


def test_an_accepted_request_is_answered_at_once_and_its_record_carries_the_output(service: Service) -> None:
    response = service.complete(prompt=PROMPT, max_tokens=50, ignore_eos=True, kv_transfer_params={"wait": "accepted"})
    assert response.status_code == 202
    transfer = response.json()["kv_transfer_params"]
    assert transfer["status"] in ("queued", "running")
    assert response.json()["choices"][0]["finish_reason"] is None
    record = service.record(transfer["save_id"])
    waited = service.completed(prompt=PROMPT, max_tokens=50, ignore_eos=True, return_token_ids=True)["choices"][0]
    assert record["status"] == "completed"
    assert record["output"] == {"text": waited["text"], "token_ids": waited["token_ids"], "finish_reason": "length"}


def test_every_choice_has_a_file_of_its_own(service: Service) -> None:
    answer = service.completed(prompt=["abc", "defg"], n=2, kv_transfer_params={"hidden_states_path": "many/"})
    transfers = [choice["kv_transfer_params"] for choice in answer["choices"]]
    assert "kv_transfer_params" not in answer
    assert [transfer["num_tokens"] for transfer in transfers] == [4, 4, 5, 5]
    assert len({transfer["hidden_states_path"] for transfer in transfers}) == 4
    assert all(transfer["status"] == service.record(transfer["save_id"])["status"] == "completed" for transfer in transfers)


def test_several_choices_need_not_wait_for_their_files(service: Service) -> None:
    answer = service.completed(n=3, kv_transfer_params={"wait": False})
    records = [service.record(choice["kv_transfer_params"]["save_id"]) for choice in answer["choices"]]
    assert [record["status"] for record in records] == ["completed"] * 3


def test_several_choices_cannot_share_one_path(service: Service) -> None:
    path = service.new_path()
    error = service.refused(400, n=2, kv_transfer_params={"hidden_states_path": path})
    assert error["param"] == "kv_transfer_params.hidden_states_path"
    assert not (service.root / path).exists()
    assert not (service.root / f"{path}.lock").exists()


VALID: list[tuple[str, Any]] = [
    ("layers", [0]),
    ("layers", [-6, "norm"]),
    ("metadata", {}),
    ("tensors", {}),
    ("wait", True),
    ("on_conflict", "error"),
    ("dtype", "auto"),
    ("pooling", None),
    ("idempotency_key", None),
    ("ttl_seconds", 3600),
    ("ttl_seconds", 86400.5),
    ("ttl_seconds", None),
]
INVALID: list[tuple[str, Any]] = [
    ("hidden_states_path", ["a"]),
    ("include_output_tokens", 1),
    ("include_output_tokens", "true"),
    ("include_last_token", 0),
    ("layers", []),
    ("layers", [7]),
    ("layers", [-7]),
    ("layers", ["final"]),
    ("layers", [1.0]),
    ("layers", [True]),
    ("layers", 2),
    ("layers", "norm"),
    ("positions", "first"),
    ("positions", []),
    ("positions", [[1]]),
    ("positions", [[1, 2, 3]]),
    ("positions", [[None, 2]]),
    ("positions", [[1, True]]),
    ("positions", [[5, 5]]),
    ("positions", [[5, 2]]),
    ("positions", [[0, 3], [2, 4]]),
    ("positions", [[3, 4], [0, 1]]),
    ("positions", [[0, 10**30]]),
    ("positions", 5),
    ("pooling", "max"),
    ("pooling", True),
    ("dtype", "int8"),
    ("dtype", 16),
    ("tensors", []),
    ("tensors", {"hidden_states": [1]}),
    ("tensors", {"token_ids": [1]}),
    ("tensors", {"positions": [1]}),
    ("tensors", {"hidden_states_scales": [1]}),
    ("tensors", {"__metadata__": [1]}),
    ("tensors", {"": [1]}),
    ("tensors", {"a\nb": [1]}),
    ("tensors", {"x" * 257: [1]}),
    ("tensors", {"a": []}),
    ("tensors", {"a": 1}),
    ("tensors", {"a": [1, True]}),
    ("tensors", {"a": ["1"]}),
    ("tensors", {"a": [[1]]}),
    ("tensors", {"a": [2**63]}),
    ("tensors", {"a": [1e39]}),
    ("metadata", ["a"]),
    ("metadata", {"a": 1}),
    ("metadata", {"a": None}),
    ("metadata", {"": "a"}),
    ("metadata", {"a": "\ud800"}),
    ("wait", 1),
    ("wait", "later"),
    ("idempotency_key", ""),
    ("idempotency_key", "x" * 257),
    ("idempotency_key", 5),
    ("on_conflict", "ignore"),
    ("on_conflict", True),
    ("extract", 1),
    ("ttl_seconds", 0),
    ("ttl_seconds", -1),
    ("ttl_seconds", 1e300),
    ("ttl_seconds", "5"),
    ("ttl_seconds", True),
    ("hidden_state_path", "x"),
    ("Layers", [1]),
]


@pytest.mark.parametrize(("field", "value"), VALID)
def test_valid_values_are_taken(service: Service, field: str, value: object) -> None:
    service.completed(kv_transfer_params={field: value})


@pytest.mark.parametrize(("field", "value"), INVALID)
def test_invalid_values_are_refused_by_the_name_of_the_field(service: Service, field: str, value: object) -> None:
    before = sorted(service.root.rglob("*"))
    error = service.refused(400, prompt=PROMPT, kv_transfer_params={field: value})
    assert error["param"].startswith(f"kv_transfer_params.{field}")
    assert error["param"] in error["message"] or "the path" in error["message"]
    assert sorted(service.root.rglob("*")) == before


def test_the_valid_range_of_layers_is_named(service: Service) -> None:
    message = service.refused(400, kv_transfer_params={"layers": [99]})["message"]
    assert message == "kv_transfer_params.layers holds 99, out of range; valid layer ids are 0 to 6, -6 to -1, or 'norm'"


def test_an_unknown_field_is_named_even_when_it_is_null(service: Service) -> None:
    error = service.refused(400, kv_transfer_params={"layer": None})
    assert (error["param"], error["code"]) == ("kv_transfer_params.layer", "unknown_field")


def test_metadata_and_tensors_are_bounded_by_1_mib_and_16_bytes_per_token(service: Service) -> None:
    limit = 2**20 + 16 * (len(PROMPT) + 1)
    fits = {"metadata": {"k": "v" * (limit - 1)}}
    service.completed(prompt=PROMPT, max_tokens=1, kv_transfer_params=fits)
    error = service.refused(400, prompt=PROMPT, max_tokens=1, kv_transfer_params={"metadata": {"k": "v" * limit}})
    assert str(limit) in error["message"]
    numbers = service.refused(400, prompt=PROMPT, max_tokens=1, kv_transfer_params={"tensors": {"a": [1] * (limit // 8 + 1)}})
    assert numbers["param"] == "kv_transfer_params.tensors"


def test_an_accepted_request_cannot_be_streamed(service: Service) -> None:
    error = service.refused(400, stream=True, kv_transfer_params={"wait": "accepted"})
    assert error["param"] == "kv_transfer_params.wait"
