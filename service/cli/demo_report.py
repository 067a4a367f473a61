"""What the demonstration prints about a completion and the file that came of it."""

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from service.cli.demo_client import Completion

LINE_WIDTH = 110
METADATA_SHOWN = (
    "format",
    "model",
    "layers",
    "layer_convention",
    "final_norm",
    "compute_dtype",
    "dtype",
    "num_prompt_tokens",
    "num_tokens",
    "created",
    "engine",
)
_SAMPLE = re.compile(r"^(?P<name>strata_[a-zA-Z0-9_]+)(?P<labels>\{[^}]*\})? (?P<value>\S+)")


def completion_lines(prompt: str, completion: Completion, record: dict[str, Any]) -> Iterator[str]:
    """The text, its speed and where the file is."""
    count, seconds = completion.completion_tokens, completion.seconds
    yield f"Prompt   {prompt}"
    yield textwrap.fill(f"Text     {completion.text.strip()}", LINE_WIDTH, subsequent_indent=" " * 9)
    yield (
        f"Speed    {completion.prompt_tokens} tokens in, {count} out, in {seconds:.2f} s: "
        f"{count / seconds:.1f} tokens per second (asked with {completion.client})"
    )
    yield f"Save     {completion.save_id}, {record['status']}"
    yield f"File     {record['hidden_states_path']} ({record['bytes']:,} bytes)"


def file_lines(path: Path) -> Iterator[str]:
    """The tensors and the metadata of a file of hidden states, and the size of its rows layer by layer."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict, it can't be iterated
    yield "Tensors"
    for name, tensor in tensors.items():
        yield f"  {name:<16} {list(tensor.shape)!s:<18} {str(tensor.dtype).removeprefix('torch.')}"
    yield "Metadata"
    for name in METADATA_SHOWN:
        if name in metadata:
            yield textwrap.fill(metadata[name], LINE_WIDTH, initial_indent=f"  {name:<18} ", subsequent_indent=" " * 21)
    yield "Norms (mean L2 of a row)"
    norms = tensors["hidden_states"].float().norm(dim=-1).mean(dim=0)  # [layers]
    largest = float(norms.max())
    for layer, norm in zip(json.loads(metadata["layers"]), norms.tolist(), strict=True):
        yield f"  layer {layer!s:<5} {norm:>10.2f}  {'#' * max(1, round(40 * norm / largest))}"


def metric_lines(exposition: str, names: Iterable[str]) -> Iterator[str]:
    """The samples of a Prometheus exposition whose name is among `names`, those that are 0 left out."""
    wanted = set(names)
    for line in exposition.splitlines():
        sample = _SAMPLE.match(line)
        if sample and sample["name"] in wanted and float(sample["value"]) != 0.0:
            yield f"  {sample['name'] + (sample['labels'] or ''):<64} {float(sample['value']):,.6g}"
