"""docs/models.md: the families of our own decoder, what their layers are made of, and the released configurations that tests run.

`python -m tests.parity.models_table` writes it; a test compares.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.models.blocks.decoder_config import DecoderConfig, DeltaNetConfig, MambaConfig, QKNorm, Scoring, ShortConvConfig
from engine.models.configuration.architectures import ARCHITECTURES
from engine.models.configuration.families import FAMILIES, read_decoder_config
from tests.parity.conftest import CLASSES, FAMILY_SETTINGS, SHAPE

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = json.loads((Path(__file__).parent / "configurations.json").read_text())
INTRODUCTION = """# Models

Families that the built-in decoder computes. For each, the test suite saves a tiny random model of transformers, runs it in every way that
the engine has (at once, in chunks of 1, 7 and 64 tokens, from prefix hits, preempted and resumed, among 32 others, to a limited depth, with
rows selected, …), and compares every row of every layer, the normed rows and the text with transformers in float64; the error of
transformers' own float32 is the yardstick (`tests/parity`). Freed blocks, pages and slots are NaN meanwhile.

*Released configurations* are those of published checkpoints, with everything that changes results as published and only the sizes cut
down; their rows are compared in the same way. A setting that changes results and isn't built is refused by name at start. Further
checkpoints of a class that is listed run as well, unless they are quantized or have such a setting.

This file is written by `python -m tests.parity.models_table`; a test compares it with the code.

| family | classes | layers | released configurations tested |
|---|---|---|---|
"""


def table() -> str:
    """The whole document."""
    return INTRODUCTION + "\n".join(_row(family) for family in FAMILIES) + "\n"


def _row(family: str) -> str:
    classes = [name for name, of in ARCHITECTURES.items() if of == family]
    released = [name for name, settings in CONFIGURATIONS.items() if ARCHITECTURES.get(settings["architectures"][0]) == family]
    cells = [family, ", ".join(f"`{name}`" for name in classes), _layers(_tiny_config(family)), ", ".join(released)]
    return f"| {' | '.join(cells)} |"


def _tiny_config(family: str) -> DecoderConfig:
    name = {"granitemoehybrid": "granite4"}.get(family, family)
    config_class, model_class = CLASSES[name]
    settings = config_class(**{**SHAPE, **FAMILY_SETTINGS[name]}, architectures=[model_class.__name__]).to_dict()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        return read_decoder_config(Path(folder))


def _layers(config: DecoderConfig) -> str:
    """What the test's tiny model has of everything that the family can have."""
    parts = ["latent attention" if config.latent is not None else "attention"]
    if any(window is not None for window in config.windows):
        parts.append("sliding windows")
    if None in config.rope_of_layer and any(rope is not None for rope in config.rope_of_layer):
        parts.append("layers without rotation")
    if all(rope is None for rope in config.rope_of_layer):
        parts.append("no rotation")
    if config.rotary is not None and config.rotary.dim < config.head_dim:
        parts.append("partial rotary")
    parts += ["query and key norms"] if config.qk_norm is not QKNorm.NONE else []
    parts += ["attention sinks"] if config.attention_sinks else []
    parts += ["soft caps"] if config.attention_soft_cap is not None else []
    parts += ["attention output gate"] if config.attention_gate else []
    parts += [_RECURRENT[type(config.recurrent)]] if config.recurrent is not None else []
    if config.experts is not None:
        scores = "sigmoid" if config.experts.scoring is Scoring.SIGMOID else "softmax"
        groups = ", in groups" if config.experts.num_groups > 1 else ""
        shared = ", shared expert" if config.experts.shared is not None else ""
        parts.append(f"experts ({scores}{groups}{shared})")
    return ", ".join(parts)


_RECURRENT = {DeltaNetConfig: "gated delta net", ShortConvConfig: "short convolution", MambaConfig: "Mamba 2"}


if __name__ == "__main__":
    DOCUMENT.write_text(table())
