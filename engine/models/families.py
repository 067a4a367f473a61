"""Maps a checkpoint's configuration to a `DecoderConfig`, a few lines per family.

Defaults are those of transformers 5, which leaves a setting out of `config.json` only where it equals them. A setting that
changes the result and isn't built is refused: a row that is silently wrong is worse than a model that doesn't load.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.nn.functional import gelu, relu, silu

from engine.models.architectures import find_family, text_settings
from engine.models.base import ModelConfig
from engine.models.checkpoint import has_weights, stored_dtype
from engine.models.decoder_config import DecoderConfig, NormNames
from engine.models.end_tokens import eos_token_ids
from engine.models.hf_config import DEFAULT_DTYPE, JsonObject, named_dtype, read_config
from engine.models.rope import DynamicRope, Rope, YarnRope
from engine.models.rope_config import read_rope, read_ropes_by_layer_type


def _gelu_tanh(states: torch.Tensor) -> torch.Tensor:
    return gelu(states, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": relu,
}

REFUSED_SETTINGS: dict[str, tuple[object, ...]] = {
    "quantization_config": (None, {}),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "use_mrope": (None, False),
}
"""Settings that change the result, and the values of each that mean "no". Gemma's attention soft cap is among them:
transformers reads it and never applies it, so what such a checkpoint wants is uncertain."""


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Raises `ModelError` for a folder that is damaged, of another architecture or with a setting that isn't built."""
    config = read_config(folder)
    architecture, family_name = find_family(config)
    family, text = FAMILIES[family_name], text_settings(config)
    for name, harmless in REFUSED_SETTINGS.items():
        for settings in (config, text):
            if settings.get(name) not in harmless:
                raise settings.error(_refusal(name, settings.get(name)))
    decoder = family.build(text.with_defaults(family.defaults, family.nullable))
    dtype = named_dtype(text) or named_dtype(config) or _stored_dtype(folder)
    tokens = text if text.get("eos_token_id") is not None else config
    model = replace(decoder.model, architecture=architecture, eos_token_ids=eos_token_ids(folder, tokens), checkpoint_dtype=dtype)
    return replace(decoder, model=model, multimodal=text is not config)


def _stored_dtype(folder: Path) -> torch.dtype:
    return (stored_dtype(folder) if has_weights(folder) else None) or DEFAULT_DTYPE


def _refusal(name: str, value: object) -> str:
    if name == "quantization_config":
        return "quantised checkpoints are not supported (quantization_config is set)"
    return f"{name} = {value!r} is not supported"


def _llama(config: JsonObject) -> DecoderConfig:
    if config.get("sliding_window") is not None:
        raise config.error("sliding_window is not a setting of LlamaForCausalLM")
    decoder = _decoder(config, _windows(config, [False] * _num_layers(config), may_differ=False))
    bias = config.flag("attention_bias", False)
    return replace(decoder, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias", False))


def _mistral(config: JsonObject) -> DecoderConfig:
    slides = config.get("sliding_window") is not None
    return _decoder(config, _windows(config, [slides] * _num_layers(config), may_differ=False))


def _qwen2(config: JsonObject) -> DecoderConfig:
    return replace(_decoder(config, _qwen_windows(config)), qkv_bias=True)


def _qwen3(config: JsonObject) -> DecoderConfig:
    bias = config.flag("attention_bias", False)
    return replace(_decoder(config, _qwen_windows(config)), qkv_bias=bias, output_bias=bias, qk_norm=True)


def _gemma3(config: JsonObject) -> DecoderConfig:
    pattern = config.integer("sliding_window_pattern", 6)
    windows = _windows(config, [(layer + 1) % pattern != 0 for layer in range(_num_layers(config))])
    decoder = _decoder(config, windows, activation="hidden_activation", rope_reader=_gemma_ropes)
    bias = config.flag("attention_bias", False)
    return replace(
        decoder,
        attention_scale=config.number("query_pre_attn_scalar") ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norms=NormNames("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        norm_adds_one=True,
        embedding_scale=decoder.model.hidden_size**0.5,
        logit_soft_cap=config.optional_number("final_logit_softcapping"),
    )


Ropes = tuple[tuple[Rope, ...], tuple[int, ...]]
"""The ropes of a model, and per layer which of them it uses."""


def _gemma_ropes(config: JsonObject, head_dim: int, windows: Sequence[int | None]) -> Ropes:
    ropes = read_ropes_by_layer_type(config, head_dim, global_theta=1_000_000.0, local_theta=10_000.0)
    return (ropes["full_attention"], ropes["sliding_attention"]), tuple(int(window is not None) for window in windows)


def _one_rope(config: JsonObject, head_dim: int, windows: Sequence[int | None]) -> Ropes:
    return (read_rope(config, head_dim),), (0,) * len(windows)


def _qwen_windows(config: JsonObject) -> tuple[int | None, ...]:
    first = config.get("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise config.error(f"max_window_layers must be a number of layers, not {first!r}")
    if not config.flag("use_sliding_window", False):
        config = JsonObject(config.source, {**config.values, "sliding_window": None})
    slides = config.get("sliding_window") is not None
    return _windows(config, [slides and layer >= first for layer in range(_num_layers(config))])


def _windows(config: JsonObject, sliding: list[bool], *, may_differ: bool = True) -> tuple[int | None, ...]:
    """The window of each layer. `layer_types`, where given, decides or (for families that don't read it) must agree."""
    named = config.get("layer_types")
    if named is not None:
        if not isinstance(named, list) or len(named) != len(sliding) or not set(named) <= {"full_attention", "sliding_attention"}:
            raise config.error("layer_types must name full_attention or sliding_attention for every layer")
        from_types = [name == "sliding_attention" for name in named]
        if not may_differ and from_types != sliding:
            raise config.error("layer_types disagrees with what this architecture computes")
        sliding = from_types
    window = config.optional_integer("sliding_window")
    if window is None and any(sliding):
        raise config.error("some layers use sliding attention, but no sliding_window is in use")
    return tuple(window if slides else None for slides in sliding)


def _num_layers(config: JsonObject) -> int:
    return config.integer("num_hidden_layers")


def _decoder(
    config: JsonObject,
    windows: tuple[int | None, ...],
    *,
    activation: str = "hidden_act",
    rope_reader: Callable[[JsonObject, int, Sequence[int | None]], Ropes] = _one_rope,
) -> DecoderConfig:
    """What all families share; `activation` is the setting's name."""
    num_heads, num_kv_heads, head_dim = _heads(config)
    ropes, rope_of_layer = rope_reader(config, head_dim, windows)
    return DecoderConfig(
        model=_model_config(config, ropes),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        activation=_activation(config, activation),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        attention_scale=head_dim**-0.5,
        windows=windows,
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        tie_embeddings=config.flag("tie_word_embeddings", False),
    )


def _heads(config: JsonObject) -> tuple[int, int, int]:
    """Query heads, key-value heads, head_dim."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = config.integer("head_dim", config.integer("hidden_size") // num_heads)
    if num_heads % num_kv_heads:
        raise config.error(f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})")
    if head_dim % 2:
        raise config.error(f"head_dim ({head_dim}) must be even for rotary embeddings")
    return num_heads, num_kv_heads, head_dim


def _activation(config: JsonObject, setting: str) -> str:
    name = config.text(setting, "silu")
    if name not in ACTIVATIONS:
        raise config.error(f"{setting} {name} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return name


def _model_config(config: JsonObject, ropes: Sequence[Rope]) -> ModelConfig:
    """Architecture, end tokens and dtype are filled in by the caller."""
    # YaRN checkpoints often keep the original context in max_position_embeddings; where they name it, the factor says what they are
    # made for.
    named = [rope.context_length for rope in ropes if isinstance(rope, YarnRope) and rope.context_length is not None]
    return ModelConfig(
        architecture="",
        num_layers=_num_layers(config),
        hidden_size=config.integer("hidden_size"),
        vocab_size=config.integer("vocab_size"),
        max_model_len=max([config.integer("max_position_embeddings"), *named]),
        eos_token_ids=(),
        checkpoint_dtype=DEFAULT_DTYPE,
        extendable=any(isinstance(rope, DynamicRope) for rope in ropes),
    )


@dataclass(frozen=True)
class Family:
    """How the configuration of one kind of decoder is read."""

    build: Callable[[JsonObject], DecoderConfig]
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Of settings that are absent, or null where null has no meaning of its own: those of transformers 5."""
    nullable: frozenset[str] = frozenset({"num_key_value_heads", "head_dim", "sliding_window"})


_LLAMA_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL_DEFAULTS: Mapping[str, object] = {
    **_LLAMA_DEFAULTS,
    "intermediate_size": 14336,
    "max_position_embeddings": 4096 * 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_QWEN2_DEFAULTS: Mapping[str, object] = {
    **_LLAMA_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA3_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_llama, _LLAMA_DEFAULTS),
    "mistral": Family(_mistral, _MISTRAL_DEFAULTS),
    "qwen2": Family(_qwen2, _QWEN2_DEFAULTS),
    "qwen3": Family(_qwen3, {**_QWEN2_DEFAULTS, "head_dim": 128}),
    "gemma3": Family(_gemma3, _GEMMA3_DEFAULTS),
}
