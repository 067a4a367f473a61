"""Maps a checkpoint's configuration to a `DecoderConfig`, a few lines per family.

Defaults are those of transformers 5, which leaves a setting out of `config.json` only where it equals them. A setting that
changes the result and isn't built is refused: a row that is silently wrong is worse than a model that doesn't load.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from engine.models.blocks.decoder_config import DecoderConfig
from engine.models.checkpoints.checkpoint import has_weights, stored_dtype
from engine.models.checkpoints.hf_config import DEFAULT_DTYPE, JsonObject, named_dtype, read_config
from engine.models.configuration import defaults, dense, hybrid, sparse
from engine.models.configuration.architectures import find_family, text_settings
from engine.models.configuration.end_tokens import eos_token_ids
from engine.models.configuration.family import Family

REFUSED_SETTINGS: dict[str, tuple[object, ...]] = {
    "quantization_config": (None, {}),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "use_mrope": (None, False),
}
"""Settings that change the result, and the values of each that mean "no", for families that don't apply them. Gemma 3's attention soft
cap is among them: transformers reads it and never applies it, so what such a checkpoint wants is uncertain."""


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Raises `ModelError` for a folder that is damaged, of another architecture or with a setting that isn't built."""
    config = read_config(folder)
    architecture, family_name = find_family(config)
    family, text = FAMILIES[family_name], text_settings(config)
    _refuse_unapplied(family, config, text)
    decoder = family.build(text.with_defaults(family.defaults, family.nullable))
    dtype = named_dtype(text) or named_dtype(config) or _stored_dtype(folder)
    tokens = text if text.get("eos_token_id") is not None else config
    model = replace(decoder.model, architecture=architecture, eos_token_ids=eos_token_ids(folder, tokens), checkpoint_dtype=dtype)
    return replace(
        decoder,
        model=model,
        multimodal=text is not config,
        mtp_prefixes=(*decoder.mtp_prefixes, *_mtp_layers(text, decoder.model.num_layers)),
    )


def _mtp_layers(config: JsonObject, first: int) -> list[str]:
    """Of layers from `first` on, whose number has one of several names."""
    count = config.count("num_nextn_predict_layers", config.count("num_mtp_layers", 0))
    return [f"model.layers.{layer}." for layer in range(first, first + count)]


def _refuse_unapplied(family: Family, *configs: JsonObject) -> None:
    for name, harmless in REFUSED_SETTINGS.items():
        for config in configs:
            for settings in (config, config.child("rope_scaling"), config.child("rope_parameters")):
                if settings is not None and name not in family.applies and settings.get(name) not in harmless:
                    raise settings.error(_refusal(name, settings.get(name)))


def _stored_dtype(folder: Path) -> torch.dtype:
    return (stored_dtype(folder) if has_weights(folder) else None) or DEFAULT_DTYPE


def _refusal(name: str, value: object) -> str:
    if name == "quantization_config":
        return "quantised checkpoints are not supported (quantization_config is set)"
    return f"{name} = {value!r} is not supported"


_PARTIAL = frozenset({"partial_rotary_factor"})
_NULLABLE_RANK = frozenset({"q_lora_rank"})

FAMILIES: Mapping[str, Family] = {
    "llama": Family(dense.llama, defaults.LLAMA),
    "mistral": Family(dense.mistral, defaults.MISTRAL),
    "qwen2": Family(dense.qwen2, defaults.QWEN2),
    "qwen3": Family(dense.qwen3, {**defaults.QWEN2, "head_dim": 128}),
    "gemma2": Family(dense.gemma2, defaults.GEMMA2, applies=frozenset({"attn_logit_softcapping"})),
    "gemma3": Family(dense.gemma3, defaults.GEMMA3),
    "phi3": Family(dense.phi3, defaults.PHI3, applies=_PARTIAL),
    "smollm3": Family(dense.smollm3, defaults.SMOLLM3),
    "granite": Family(dense.granite, defaults.LLAMA),
    "olmo2": Family(dense.olmo2, defaults.OLMO2),
    "olmo3": Family(dense.olmo3, {**defaults.OLMO2, "sliding_window": 4096}),
    "exaone4": Family(dense.exaone4, defaults.EXAONE4),
    "cohere2": Family(dense.cohere2, defaults.COHERE2),
    "starcoder2": Family(dense.starcoder2, defaults.STARCODER2),
    "glm": Family(dense.glm, defaults.GLM, applies=_PARTIAL),
    "glm4": Family(dense.glm4, defaults.GLM, applies=_PARTIAL),
    "qwen2_moe": Family(sparse.qwen2_moe, defaults.QWEN2_MOE),
    "qwen3_moe": Family(sparse.qwen3_moe, defaults.QWEN3_MOE),
    "mixtral": Family(sparse.mixtral, defaults.MIXTRAL),
    "glm4_moe": Family(sparse.glm4_moe, defaults.GLM4_MOE, applies=_PARTIAL),
    "deepseek_v2": Family(sparse.deepseek_v2, defaults.DEEPSEEK_V2, _NULLABLE_RANK),
    "deepseek_v3": Family(sparse.deepseek_v3, defaults.DEEPSEEK_V3, _NULLABLE_RANK),
    "glm4_moe_lite": Family(sparse.glm4_moe_lite, defaults.GLM4_MOE_LITE, _NULLABLE_RANK),
    "qwen3_next": Family(hybrid.qwen3_next, defaults.QWEN3_NEXT, applies=_PARTIAL),
    "qwen3_5": Family(hybrid.qwen3_5, defaults.QWEN3_5, applies=_PARTIAL),
    "qwen3_5_moe": Family(hybrid.qwen3_5_moe, defaults.QWEN3_5_MOE, applies=_PARTIAL),
    "granitemoehybrid": Family(hybrid.granite4, defaults.GRANITE4),
    "nemotron_h": Family(hybrid.nemotron_h, defaults.NEMOTRON_H),
    "lfm2": Family(hybrid.lfm2, defaults.LFM2),
    "llama4": Family(sparse.llama4, defaults.LLAMA4),
    "gpt_oss": Family(sparse.gpt_oss, defaults.GPT_OSS),
    "minimax_m2": Family(sparse.minimax_m2, defaults.MINIMAX_M2, applies=_PARTIAL),
}
