"""What a trainer's data loader does when no files are there: states are generated, waited for, loaded, checked and deleted.

Run by the Python of the client's environment: `speculators_online.py ENDPOINT DATASET OFFLINE_FILES`, where OFFLINE_FILES is a folder of
files that `generate-offline-data` has made of the same dataset. Prints a JSON object.
"""

import json
import sys
from pathlib import Path

import torch
from hs_connectors import FileTransfer, FP8Transfer
from openai import OpenAI
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn

COUNT = 8
WIDTH = 576


def relative_error(rows: torch.Tensor, reference: torch.Tensor) -> float:
    return float(((rows.double() - reference.double()).norm() / reference.double().norm()).item())


def online(endpoint: str, dataset: str, empty: Path, offline: ArrowDataset) -> dict[str, object]:
    loader = ArrowDataset(512, dataset, FileTransfer(empty), endpoint, on_missing="generate", max_retries=0)
    items = [loader[index] for index in range(COUNT)]
    errors, tokens = [], 0
    for index, item in enumerate(items):
        made_before = offline[index]
        assert torch.equal(item["input_ids"], made_before["input_ids"])
        assert torch.equal(item["loss_mask"], made_before["loss_mask"])
        errors += [relative_error(item[name], made_before[name]) for name in ("hidden_states", "verifier_last_hidden_states")]
        tokens += int(item["lengths"])
    batch = CollateFn(512, WIDTH, dtype=torch.float32, preprocess=shift_batch)(items)
    return {"worst_error": max(errors), "tokens": tokens, "shape": list(batch["hidden_states"].shape), "dropped": batch["error_records"]}


def float8(endpoint: str, offline: ArrowDataset) -> float:
    """The error of rows that were asked for as float8 and read by the client's own way of scaling them back."""
    client = OpenAI(base_url=endpoint, api_key="EMPTY", max_retries=0)
    prompt = offline[0]["input_ids"].tolist()
    answer = client.completions.create(
        model=client.models.list().data[0].id,
        prompt=prompt,
        max_tokens=1,
        extra_body={"kv_transfer_params": {"dtype": "float8_e4m3fn"}},
    )
    transfer = FP8Transfer(Path("unused"))
    loaded = transfer.get_generated(answer.kv_transfer_params)
    assert loaded is not None
    transfer.delete(answer.kv_transfer_params["hidden_states_path"])
    rows = loaded["hidden_states"]
    return max(
        relative_error(rows[:, :-1].flatten(1), offline[0]["hidden_states"]),
        relative_error(rows[:, -1], offline[0]["verifier_last_hidden_states"]),
    )


def main(endpoint: str, dataset: str, files: str) -> None:
    empty = Path(files).parent / "nothing-yet"
    empty.mkdir()
    offline = ArrowDataset(512, dataset, FileTransfer(Path(files)), on_missing="raise")
    report = online(endpoint, dataset, empty, offline) | {"float8_error": float8(endpoint, offline)}
    print(json.dumps(report | {"left": len(list(empty.iterdir()))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
