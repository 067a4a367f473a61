"""Families whose layers all have one MLP: each builder maps a checkpoint's configuration to a `DecoderConfig`."""

from collections.abc import Sequence
from dataclasses import replace

from engine.models.blocks.decoder_config import DecoderConfig, MLPNames, NormNames, QKNorm
from engine.models.checkpoints.hf_config import JsonObject
from engine.models.configuration.family import Ropes, no_windows, num_layers, read_decoder, read_windows, with_attention_bias
from engine.models.configuration.rope_config import read_ropes_by_layer_type


def llama(config: JsonObject) -> DecoderConfig:
    if config.get("sliding_window") is not None:
        raise config.error("sliding_window is not a setting of LlamaForCausalLM")
    decoder = read_decoder(config, no_windows(config))
    return replace(with_attention_bias(decoder, config), mlp_bias=config.flag("mlp_bias", False))


def mistral(config: JsonObject) -> DecoderConfig:
    slides = config.get("sliding_window") is not None
    return read_decoder(config, read_windows(config, [slides] * num_layers(config), may_differ=False))


def phi3(config: JsonObject) -> DecoderConfig:
    """Its first configurations call the long rope "su" or "yarn"."""
    for name in ("rope_scaling", "rope_parameters"):
        entry = config.child(name)
        if entry is not None and entry.text("rope_type", entry.text("type", "")) in ("su", "yarn"):
            longrope = {**entry.values, "type": "longrope", "rope_type": "longrope"}
            config = config.with_values(**{name: longrope})
    return mistral(config)


def granite(config: JsonObject) -> DecoderConfig:
    return with_multipliers(llama(config), config)


def with_multipliers(decoder: DecoderConfig, config: JsonObject) -> DecoderConfig:
    """Granite's."""
    return replace(
        decoder,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_divisor=config.number("logits_scaling", 1.0),
    )


def smollm3(config: JsonObject) -> DecoderConfig:
    count, rotates = num_layers(config), config.get("no_rope_layers")
    if rotates is None:
        interval = config.integer("no_rope_layer_interval", 4)
        rotates = [int((layer + 1) % interval != 0) for layer in range(count)]
    if not isinstance(rotates, list) or len(rotates) != count or not all(rotated in (0, 1) for rotated in rotates):
        raise config.error("no_rope_layers must be 0 or 1 for every layer")
    if not config.flag("use_sliding_window", False):
        config = config.with_values(sliding_window=None, layer_types=None)
    slides = config.get("sliding_window") is not None
    decoder = read_decoder(config, read_windows(config, [slides and not rotated for rotated in rotates]))
    decoder = replace(decoder, rope_of_layer=tuple(0 if rotated else None for rotated in rotates))
    return replace(with_attention_bias(decoder, config), mlp_bias=config.flag("mlp_bias", False))


def qwen2(config: JsonObject) -> DecoderConfig:
    return replace(read_decoder(config, _qwen_windows(config)), qkv_bias=True)


def qwen3(config: JsonObject) -> DecoderConfig:
    return replace(with_attention_bias(read_decoder(config, _qwen_windows(config)), config), qk_norm=QKNorm.HEAD)


_AFTER_ONLY = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_AROUND = NormNames("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def olmo2(config: JsonObject) -> DecoderConfig:
    decoder = with_attention_bias(read_decoder(config, no_windows(config)), config)
    return replace(decoder, qk_norm=QKNorm.ALL_HEADS, norms=_AFTER_ONLY, norm_in_float32=True)


def olmo3(config: JsonObject) -> DecoderConfig:
    windows = read_windows(config, [(layer + 1) % 4 != 0 for layer in range(num_layers(config))])
    decoder = with_attention_bias(read_decoder(config, windows, rope_reader=_olmo3_ropes), config)
    return replace(decoder, qk_norm=QKNorm.ALL_HEADS, norms=_AFTER_ONLY, norm_in_float32=True)


def _olmo3_ropes(config: JsonObject, rotary_dim: int, windows: Sequence[int | None]) -> Ropes:
    """The windowed layers' theta is the default whatever the configuration's is, as in transformers."""
    return _ropes_by_layer_type(config, rotary_dim, windows, global_theta=500_000.0, local_theta=500_000.0)


def exaone4(config: JsonObject) -> DecoderConfig:
    """With windows, full layers don't rotate."""
    pattern, window = config.get("sliding_window_pattern"), config.get("sliding_window")
    if isinstance(pattern, str) and config.get("layer_types") is None:
        raise config.error("sliding_window_pattern as a text is read only beside layer_types")
    if window is None or not isinstance(pattern, int) or pattern < 1:
        sliding = [False] * num_layers(config)
    else:
        sliding = [(layer + 1) % pattern != 0 for layer in range(num_layers(config))]
    windows = read_windows(config, sliding)
    decoder = read_decoder(config, windows)
    rope_of_layer = tuple(0 if window is None or slides is not None else None for slides in windows)
    return replace(decoder, rope_of_layer=rope_of_layer, qk_norm=QKNorm.HEAD, norms=_AFTER_ONLY)


def glm(config: JsonObject) -> DecoderConfig:
    decoder = read_decoder(config, no_windows(config), interleaved=True)
    return replace(decoder, qkv_bias=config.flag("attention_bias", True))


def glm4(config: JsonObject) -> DecoderConfig:
    norms = NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return replace(glm(config), norms=norms)


def cohere2(config: JsonObject) -> DecoderConfig:
    """Layers without a window don't rotate. Where the configuration doesn't say otherwise, every fourth layer has none."""
    pattern = config.integer("sliding_window_pattern", 4)
    windows = read_windows(config, [(layer + 1) % pattern != 0 for layer in range(num_layers(config))])
    decoder = with_attention_bias(read_decoder(config, windows, norm_eps="layer_norm_eps", interleaved=True), config)
    return replace(
        decoder,
        rope_of_layer=tuple(None if window is None else 0 for window in windows),
        norms=NormNames("input_layernorm", None, None),
        layer_norm=True,
        parallel=True,
        logit_divisor=1 / config.number("logit_scale", 0.0625),
    )


def starcoder2(config: JsonObject) -> DecoderConfig:
    bias, slides = config.flag("use_bias", True), config.get("sliding_window") is not None
    windows = read_windows(config, [slides] * num_layers(config), may_differ=False)
    return replace(
        read_decoder(config, windows, norm_eps="norm_epsilon"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        layer_norm=True,
        norm_bias=True,
        mlp=MLPNames("c_fc", "c_proj", None),
    )


def gemma2(config: JsonObject) -> DecoderConfig:
    windows = read_windows(config, [layer % 2 == 0 for layer in range(num_layers(config))])
    decoder = _gemma(config, read_decoder(config, windows, activation="hidden_activation"))
    return replace(decoder, attention_soft_cap=config.optional_number("attn_logit_softcapping"))


def gemma3(config: JsonObject) -> DecoderConfig:
    pattern = config.integer("sliding_window_pattern", 6)
    windows = read_windows(config, [(layer + 1) % pattern != 0 for layer in range(num_layers(config))])
    decoder = read_decoder(config, windows, activation="hidden_activation", rope_reader=_gemma3_ropes)
    return replace(_gemma(config, decoder), qk_norm=QKNorm.HEAD)


def _gemma(config: JsonObject, decoder: DecoderConfig) -> DecoderConfig:
    return replace(
        with_attention_bias(decoder, config),
        attention_scale=config.number("query_pre_attn_scalar") ** -0.5,
        norms=_AROUND,
        norm_adds_one=True,
        embedding_scale=decoder.model.hidden_size**0.5,
        logit_soft_cap=config.optional_number("final_logit_softcapping"),
    )


def _gemma3_ropes(config: JsonObject, rotary_dim: int, windows: Sequence[int | None]) -> Ropes:
    return _ropes_by_layer_type(config, rotary_dim, windows, global_theta=1_000_000.0, local_theta=10_000.0)


def _ropes_by_layer_type(
    config: JsonObject, rotary_dim: int, windows: Sequence[int | None], *, global_theta: float, local_theta: float
) -> Ropes:
    ropes = read_ropes_by_layer_type(config, rotary_dim, global_theta=global_theta, local_theta=local_theta)
    return (ropes["full_attention"], ropes["sliding_attention"]), tuple(int(window is not None) for window in windows)


def _qwen_windows(config: JsonObject) -> tuple[int | None, ...]:
    first = config.get("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise config.error(f"max_window_layers must be a number of layers, not {first!r}")
    if not config.flag("use_sliding_window", False):
        config = config.with_values(sliding_window=None)
    slides = config.get("sliding_window") is not None
    return read_windows(config, [slides and layer >= first for layer in range(num_layers(config))])
