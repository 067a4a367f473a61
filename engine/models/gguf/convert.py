"""A GGUF file turned into a Hugging Face model folder: float32 safetensors, configuration and tokenizer."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from engine.errors import ModelError
from engine.models.checkpoints.prepared import Progress
from engine.models.gguf.families import ROPE_FACTORS, TOP_NAMES, GGUFFamily, family_of
from engine.models.gguf.file import GGUFFile
from engine.models.gguf.settings import GGUFSettings
from engine.models.gguf.tokenizer import build_tokenizer, special_token_ids, tokenizer_config

CONVERTER_VERSION = 2
"""Raised when the same GGUF would give another folder: folders made by an older converter are then made anew."""
SHARD_BYTES = 4 << 30
"""A shard is held in memory while it is written."""


def convert_gguf(path: Path, folder: Path, name: str, progress: Progress) -> None:
    """Fills the empty `folder` from the GGUF file at `path` (the architectures of `families.py`), or from all parts of a split one.

    Weights are stored as the exact float32 values of the quantised ones. The configuration names the dtype that the matrices are
    stored in, bfloat16 where they are quantised. Raises `ModelError` for a file that can't be converted faithfully.
    """
    file = GGUFFile(path)
    family = family_of(file.metadata)
    config = _config(file, family)
    names = _tensor_names(file, family, config["num_hidden_layers"])
    progress(f"building the tokenizer of {name}")
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special_token_ids(file.metadata))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(file.metadata))
    build_tokenizer(file.metadata).save(str(folder / "tokenizer.json"), pretty=False)
    _write_weights(file, family, config, names, folder, _Counter(name, len(names), progress))


class _Counter:
    """Tells how far a conversion has come, about ten times in all."""

    def __init__(self, name: str, total: int, progress: Progress) -> None:
        self._name, self._total, self._progress = name, total, progress
        self._done = 0

    def step(self) -> None:
        self._progress.check()
        self._done += 1
        if self._done % max(1, self._total // 10) == 0 or self._done == self._total:
            self._progress(f"converting {self._name}: {self._done}/{self._total} tensors")


def _config(file: GGUFFile, family: GGUFFamily) -> dict[str, Any]:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.metadata.source} lacks the tensor token_embd.weight")
    vocab_size = file.shape("token_embd.weight")[0]
    num_tokens = len(file.metadata.get("tokenizer.ggml.tokens", list))
    if num_tokens > vocab_size:
        raise ModelError(f"{file.metadata.source} lists {num_tokens} tokens, but embeds only {vocab_size}")
    settings = GGUFSettings(file.metadata)
    factors = file.read(ROPE_FACTORS).tolist() if ROPE_FACTORS in file.tensors else None
    config = family.config(settings, factors)
    settings.refuse_unknown()
    return config | {
        "vocab_size": vocab_size,
        "dtype": file.dtype,
        "attention_bias": _has_biases(file, family),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **special_token_ids(file.metadata),
    }


def _has_biases(file: GGUFFile, family: GGUFFamily) -> bool:
    return any(f"blk.0.{name}.bias" in file.tensors for name in family.optional_biases)


def _tensor_names(file: GGUFFile, family: GGUFFamily, num_layers: int) -> dict[str, str]:
    """GGUF name to Hugging Face name of every tensor. Raises for one that is missing, or that this conversion would lose."""
    names = {name: target for name, target in TOP_NAMES.items() if name != "output.weight" or name in file.tensors}
    biases = (*family.biases, *(family.optional_biases if _has_biases(file, family) else ()))
    for layer in range(num_layers):
        kinds = [(name, "weight") for name in family.layer_names] + [(name, "bias") for name in biases]
        names |= {f"blk.{layer}.{name}.{kind}": f"model.layers.{layer}.{family.layer_names[name]}.{kind}" for name, kind in kinds}
    missing = sorted(names.keys() - file.tensors.keys())
    unknown = sorted(file.tensors.keys() - names.keys() - {ROPE_FACTORS})
    if missing:
        raise ModelError(f"{file.metadata.source} lacks the tensor {missing[0]} ({len(missing)} missing in all)")
    if unknown:
        raise ModelError(f"{file.metadata.source} holds the tensor {unknown[0]}, whose meaning is not known ({len(unknown)} such in all)")
    return names


def _restored(weights: NDArray[np.float32], name: str, family: GGUFFamily, config: Mapping[str, Any]) -> NDArray[np.float32]:
    """The weights as the original checkpoint has them."""
    key = name.split(".")[-2]
    if key in family.permuted:
        return unpermute(weights, config[family.permuted[key]])
    if family.norms_plus_one and key.endswith("norm"):
        return weights - np.float32(1)
    return weights


def unpermute(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a projection `[heads * head_dim, width]`, or of its bias `[heads * head_dim]`, from interleaved rotary order back to halves.

    llama.cpp's conversion splits each head's rows into two halves and interleaves them; this undoes it.
    """
    pairs = weights.reshape(heads, -1, 2, *weights.shape[1:])  # [heads, head_dim / 2, 2, width]
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weights.shape))


def _write_weights(
    file: GGUFFile, family: GGUFFamily, config: Mapping[str, Any], names: Mapping[str, str], folder: Path, counter: _Counter
) -> None:
    shards = list(_shards(file, names))
    shard_of: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        shard_name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, NDArray[np.float32]] = {}
        for name in shard:
            tensors[names[name]] = _restored(file.read(name), name, family, config)
            counter.step()
        save_file(tensors, folder / shard_name, metadata={"format": "pt"})
        # The library makes files that only their owner can read; the folder's own mode is what decides.
        (folder / shard_name).chmod(0o644)
        shard_of |= dict.fromkeys(tensors, shard_name)
    if len(shards) > 1:
        total = sum(_float32_bytes(file, name) for name in names)
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": shard_of})


def _shards(file: GGUFFile, names: Mapping[str, str]) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for name in names:
        nbytes = _float32_bytes(file, name)
        if shard and size + nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += nbytes
    yield shard


def _float32_bytes(file: GGUFFile, name: str) -> int:
    return 4 * int(np.prod(file.shape(name)))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
