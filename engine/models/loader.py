"""Loads a model folder."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engine.models.base import Model, ModelConfig
from engine.models.blocks.decoder_config import DecoderConfig
from engine.models.blocks.linear import DenseLinears, Linears
from engine.models.blocks.ops import Ops
from engine.models.checkpoints.checkpoint import Checkpoint
from engine.models.checkpoints.tensor_names import is_of_other_modality
from engine.models.configuration.families import read_decoder_config
from engine.models.decoder import Decoder
from engine.models.weights import WeightLoader


def read_model_config(folder: Path) -> ModelConfig:
    """What `config.json` and `generation_config.json` say, without touching the weights. Raises `ModelError`."""
    return read_decoder_config(folder).model


def load_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int | None = None,
    ops: Ops | None = None,
    linears: Linears | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """A model ready to run, its weights streamed from safetensors and converted to `dtype` on the way.

    `max_model_len` is the context limit that the server runs with (the checkpoint's own where None): rotary tables reach that
    far, and of the variants whose frequencies depend on the sequence's length it picks the set. With dynamic (NTK) or longrope
    scaling, a limit of at most the original context gives the unscaled or short set; a limit above it gives the set for that
    very limit, or the long one, for every prompt however short. One set for all, because a cached key keeps the rotation it was
    given, and a row must not depend on how its request was run. So rows equal those of transformers for every prompt up
    to the original context where the limit is no higher, and for prompts of exactly the limit (longrope: for all prompts
    above the original context) where it is.

    `linears` computes the matrix products and `ops` what lies between them (None: torch).

    `progress(done, total)` is called with bytes of the checkpoint as they are read. Raises `ModelError`.
    """
    config = read_decoder_config(folder)
    linears = linears or DenseLinears(dtype, device)
    checkpoint = Checkpoint(folder, progress, wanted=partial(_is_of_decoder, config))
    weights = WeightLoader(config, checkpoint, linears, dtype=dtype, device=device).load(folder)
    return Decoder(config, weights, max_model_len or config.model.max_model_len, ops)


def _is_of_decoder(config: DecoderConfig, name: str) -> bool:
    """Whether a weight isn't of another part of the model: a vision tower, or MTP layers."""
    if config.multimodal and is_of_other_modality(name):
        return False
    return not (config.mtp_prefixes and name.startswith(config.mtp_prefixes))
