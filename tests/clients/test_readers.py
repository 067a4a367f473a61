"""Saved files through the safetensors library: NumPy without torch, torch, and one layer of a file that is never read as a whole."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from service.cli.launcher import ServiceProcess
from tests.clients.conftest import ClientPython

HERE = Path(__file__).parent
PROMPT = list(range(1000, 1040))
ALL_LAYERS = list(range(31))

READ_A_SLICE = """
import json, sys
from pathlib import Path
from safetensors import safe_open
import torch

def read_bytes():
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])

def own_memory():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

with safe_open(sys.argv[2], framework="pt") as file:  # The library's own parts are loaded by now.
    file.get_slice("token_ids")[:]
bytes_before, memory_before = read_bytes(), own_memory()
with safe_open(sys.argv[1], framework="pt") as file:
    layer = file.metadata()["layers"]
    rows = file.get_slice("hidden_states")[:, json.loads(layer).index(15)]
print(json.dumps({"read": read_bytes() - bytes_before, "memory": own_memory() - memory_before, "sum": float(rows.double().sum())}))
"""


def saved(service: ServiceProcess, prompt: list[int], **params: Any) -> str:  # noqa: ANN401 - any JSON value
    """The path of a new file with the states of the prompt."""
    body = {"prompt": prompt, "max_tokens": 0, "kv_transfer_params": params}
    response = httpx.post(f"{service.url}/v1/completions", json=body, timeout=None, trust_env=False)
    assert response.status_code == 200, response.text
    path: str = response.json()["kv_transfer_params"]["hidden_states_path"]
    return path


def as_float32(path: str) -> torch.Tensor:
    loaded = load_file(path)
    states = loaded["hidden_states"].float()
    return states * loaded["hidden_states_scales"] if "hidden_states_scales" in loaded else states


def test_numpy_reads_what_torch_reads(service: ServiceProcess, client_python: ClientPython) -> None:
    dtypes = ["float32", "bfloat16", "float8_e4m3fn"]
    paths = [saved(service, PROMPT, dtype=dtype, layers=[2, 15, -1, "norm"]) for dtype in dtypes]
    paths.append(saved(service, PROMPT, dtype="float16", layers=["norm"]))

    command = [client_python("readers"), HERE / "read_without_torch.py", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [hashlib.sha256(as_float32(path).numpy().tobytes()).hexdigest() for path in paths]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_torch_reads_the_dtype_that_was_asked_for(service: ServiceProcess, dtype: str) -> None:
    path = saved(service, PROMPT, dtype=dtype, layers=["norm"])
    loaded = load_file(path)
    assert loaded["hidden_states"].dtype == getattr(torch, dtype)
    assert loaded["token_ids"].tolist() == PROMPT
    exact = as_float32(saved(service, PROMPT, dtype="float32", layers=["norm"]))
    assert ((as_float32(path) - exact).norm() / exact.norm()).item() < 0.05


def test_one_layer_is_a_slice_of_the_file(service: ServiceProcess) -> None:
    path = saved(service, PROMPT, dtype="float32", layers=[2, 15, 30])
    with safe_open(path, framework="pt") as file:
        layers = json.loads(file.metadata()["layers"])
        rows = file.get_slice("hidden_states")[:, layers.index(15)]
        some = file.get_slice("hidden_states")[10:20]
    whole = load_file(path)["hidden_states"]
    assert torch.equal(rows, whole[:, 1])
    assert torch.equal(some, whole[10:20])


def test_one_layer_is_read_without_reading_the_file(service: ServiceProcess) -> None:
    """The slice comes out of a mapping of the file: nothing is copied but the slice."""
    large = saved(service, [token + 500 for token in range(400)], dtype="float32", layers=ALL_LAYERS)
    small = saved(service, PROMPT, dtype="float32", layers=[1])
    size = Path(large).stat().st_size
    assert size > 25 * 2**20

    done = subprocess.run([sys.executable, "-c", READ_A_SLICE, large, small], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)

    assert report["read"] < size / 10
    assert report["memory"] < size / 4
    assert report["sum"] == pytest.approx(load_file(large)["hidden_states"][:, 15].double().sum().item())
