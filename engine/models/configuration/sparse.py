"""Families with layers of experts: each builder maps a checkpoint's configuration to a `DecoderConfig`."""

from dataclasses import replace

from engine.models.blocks.decoder_config import (
    AttentionTemperature,
    ClampedGate,
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    MLPNames,
    QKNorm,
    Scoring,
    SharedExpert,
)
from engine.models.checkpoints.hf_config import JsonObject
from engine.models.configuration.family import expect, no_windows, num_layers, read_decoder, read_windows, with_attention_bias
from engine.models.configuration.rope_config import yarn_score_scale


def qwen2_moe(config: JsonObject) -> DecoderConfig:
    """Where windows are used, every second layer has one."""
    slides = config.flag("use_sliding_window", False)
    last = config.integer("max_window_layers")
    if not slides:
        config = config.with_values(sliding_window=None)
    windows = read_windows(config, [slides and layer % 2 == 0 and layer < last for layer in range(num_layers(config))])
    shared = SharedExpert("shared_expert", config.integer("shared_expert_intermediate_size"), gated=True)
    experts = replace(qwen_experts(config), shared=shared)
    return replace(read_decoder(config, windows), qkv_bias=config.flag("qkv_bias", True), experts=experts)


def qwen3_moe(config: JsonObject) -> DecoderConfig:
    """Where windows are used, all layers have one."""
    slides = config.flag("use_sliding_window", False)
    if not slides:
        config = config.with_values(sliding_window=None)
    windows = read_windows(config, [slides] * num_layers(config), may_differ=False)
    decoder = with_attention_bias(read_decoder(config, windows), config)
    return replace(decoder, qk_norm=QKNorm.HEAD, experts=qwen_experts(config))


def mixtral(config: JsonObject) -> DecoderConfig:
    slides = config.get("sliding_window") is not None
    windows = read_windows(config, [slides] * num_layers(config), may_differ=False)
    experts = read_experts(config, "intermediate_size", frozenset(range(num_layers(config))), normalise=True)
    return replace(read_decoder(config, windows), experts=experts)


def glm4_moe(config: JsonObject) -> DecoderConfig:
    decoder = read_decoder(config, no_windows(config))
    qk_norm = QKNorm.HEAD if config.flag("use_qk_norm", False) else QKNorm.NONE
    return replace(decoder, qkv_bias=config.flag("attention_bias", False), qk_norm=qk_norm, experts=deepseek_experts(config))


def minimax_m2(config: JsonObject) -> DecoderConfig:
    """Its configurations say how many dimensions of a head are rotated, not which share."""
    head_dim = config.integer("head_dim")
    if (rotary_dim := config.optional_integer("rotary_dim")) is not None:
        config = config.with_defaults({"partial_rotary_factor": rotary_dim / head_dim})
    for name, value in (("scoring_func", "sigmoid"), ("use_routing_bias", True), ("use_qk_norm", True), ("qk_norm_type", "per_layer")):
        expect(config, name, value)
    expect(config, "shared_intermediate_size", 0)
    expect(config, "attn_type_list", [1] * num_layers(config))
    layers = frozenset(range(num_layers(config)))
    experts = read_experts(config, "intermediate_size", layers, normalise=True, scoring=Scoring.SIGMOID)
    experts = replace(experts, correction="e_score_correction_bias")
    return replace(read_decoder(config, no_windows(config)), qk_norm=QKNorm.ALL_HEADS, experts=experts)


def gpt_oss(config: JsonObject) -> DecoderConfig:
    windows = read_windows(config, [layer % 2 == 0 for layer in range(num_layers(config))])
    decoder = with_attention_bias(read_decoder(config, windows), config)
    clamp = ClampedGate(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0))
    experts = replace(
        read_experts(config, "intermediate_size", frozenset(range(num_layers(config))), normalise=True),
        router="router",
        bias=True,
        clamp=clamp,
        inputs_first=True,
        outputs_in_turns=True,
    )
    return replace(decoder, attention_sinks=True, norm_in_float32=True, experts=experts)


def llama4(config: JsonObject) -> DecoderConfig:
    """Layers that rotate attend within chunks; those that don't have their queries' temperature tuned. Every so many layers are sparse."""
    count, interval = num_layers(config), config.integer("no_rope_layer_interval")
    rotates = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    if not isinstance(rotates, list) or len(rotates) != count or not all(rotated in (0, 1) for rotated in rotates):
        raise config.error("no_rope_layers must be 0 or 1 for every layer")
    chunk, kinds = config.optional_integer("attention_chunk_size"), config.get("layer_types")
    if kinds is None:
        kinds = ["chunked_attention" if rotated and chunk is not None else "full_attention" for rotated in rotates]
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"chunked_attention", "full_attention"}:
        raise config.error("layer_types must name chunked_attention or full_attention for every layer")
    if chunk is None and "chunked_attention" in kinds:
        raise config.error("some layers attend in chunks, but there is no attention_chunk_size")
    step = config.integer("interleave_moe_layer_step")
    sparse = config.get("moe_layers") if config.get("moe_layers") is not None else list(range(step - 1, count, step))
    if not isinstance(sparse, list) or not all(layer in range(count) for layer in sparse):
        raise config.error("moe_layers must be a list of layers")
    size = config.integer("intermediate_size")
    experts = replace(
        read_experts(config, "intermediate_size", frozenset(sparse), normalise=False, scoring=Scoring.SIGMOID),
        router="router",
        shared=SharedExpert("shared_expert", size),
        weighs_inputs=True,
        inputs_first=True,
    )
    windows = tuple(chunk if kind == "chunked_attention" else None for kind in kinds)
    decoder = with_attention_bias(read_decoder(config.with_values(layer_types=None), windows, interleaved=True), config)
    tuned = config.get("attn_temperature_tuning") not in (False, 0)  # transformers 4 wrote 4
    return replace(
        decoder,
        intermediate_size=config.integer("intermediate_size_mlp"),
        rope_of_layer=tuple(0 if rotated else None for rotated in rotates),
        qk_norm=QKNorm.AFTER_ROTATION if config.flag("use_qk_norm", True) else QKNorm.NONE,
        chunked=True,
        temperature=AttentionTemperature(config.number("attn_scale"), config.integer("floor_scale")) if tuned else None,
        mlp=MLPNames(prefix="feed_forward"),
        experts=experts,
    )


def deepseek_v2(config: JsonObject) -> DecoderConfig:
    for name, value in (("scoring_func", "softmax"), ("norm_topk_prob", False), ("moe_layer_freq", 1)):
        expect(config, name, value)
    expect(config, "topk_method", "greedy", "group_limited_greedy")
    experts = replace(deepseek_experts(config, Scoring.SOFTMAX), num_best=1, correction=None, normalise=False)
    if config.text("topk_method", "greedy") == "greedy":
        experts = replace(experts, num_groups=1, num_chosen_groups=1)
    return replace(_latent(config, interleaved=True), experts=experts, mlp_bias=config.flag("mlp_bias", False))


def deepseek_v3(config: JsonObject) -> DecoderConfig:
    for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        expect(config, name, value)
    return replace(_latent(config, interleaved=config.flag("rope_interleave", True)), experts=deepseek_experts(config))


def glm4_moe_lite(config: JsonObject) -> DecoderConfig:
    """`mlp_layer_types` says which layers are sparse; where it doesn't, all but the first are."""
    expect(config, "first_k_dense_replace", 1)
    experts, kinds = deepseek_experts(config), config.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers(config) or not set(kinds) <= {"dense", "sparse"}:
            raise config.error("mlp_layer_types must name dense or sparse for every layer")
        experts = replace(experts, layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse"))
    return replace(_latent(config, interleaved=config.flag("rope_interleave", True)), experts=experts)


def _latent(config: JsonObject, *, interleaved: bool) -> DecoderConfig:
    """A decoder with latent attention. YaRN's scale of long contexts is applied to scores, not to the rotated dimensions alone."""
    rank, rotary = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    latent = LatentConfig(
        config.optional_integer("q_lora_rank"), rank, config.integer("qk_nope_head_dim"), rotary, config.integer("v_head_dim")
    )
    config = config.with_values(head_dim=rotary, num_key_value_heads=None)
    decoder = read_decoder(config, no_windows(config), interleaved=interleaved)
    scale = (latent.plain_dim + rotary) ** -0.5 * yarn_score_scale(config)
    return replace(decoder, latent=latent, attention_scale=scale, output_bias=config.flag("attention_bias", False))


def deepseek_experts(config: JsonObject, scoring: Scoring = Scoring.SIGMOID) -> ExpertsConfig:
    """As DeepSeek V3 has them, and those who took them over: the first layers are dense, and all rows share one more expert."""
    layers = frozenset(range(config.count("first_k_dense_replace", 0), num_layers(config)))
    inner, num_shared = config.integer("moe_intermediate_size"), config.count("n_shared_experts", 0)
    experts = replace(
        read_experts(config, "moe_intermediate_size", layers, normalise=config.flag("norm_topk_prob", True), scoring=scoring),
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group", 1),
        num_chosen_groups=config.integer("topk_group", 1),
        wide_router=True,
        correction="gate.e_score_correction_bias",
        shared=SharedExpert("shared_experts", inner * num_shared) if num_shared else None,
    )
    size, rest = divmod(experts.num_experts, experts.num_groups)
    if rest or (experts.num_groups > 1 and size < 2):
        raise config.error(f"n_group ({experts.num_groups}) must divide the {experts.num_experts} experts into groups of two or more")
    if experts.num_chosen_groups > experts.num_groups or experts.num_chosen_groups * size < experts.num_per_token:
        raise config.error(f"topk_group: {experts.num_chosen_groups} of {experts.num_groups} groups hold too few experts")
    return experts


def qwen_experts(config: JsonObject) -> ExpertsConfig:
    dense, step = config.get("mlp_only_layers") or [], config.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise config.error("mlp_only_layers must be a list of layers")
    if step < 1:
        raise config.error(f"decoder_sparse_step ({step}) must be at least 1")
    layers = frozenset(layer for layer in range(num_layers(config)) if layer not in dense and (layer + 1) % step == 0)
    return read_experts(config, "moe_intermediate_size", layers, normalise=config.flag("norm_topk_prob", False))


def read_experts(
    config: JsonObject, size: str, layers: frozenset[int], *, normalise: bool, scoring: Scoring = Scoring.SOFTMAX
) -> ExpertsConfig:
    """`size` is the name of the setting."""
    count, chosen = num_experts(config), config.integer("num_experts_per_tok")
    if not 1 <= chosen <= count:
        raise config.error(f"num_experts_per_tok ({chosen}) must be between 1 and the number of experts ({count})")
    return ExpertsConfig(count, chosen, config.integer(size), layers, scoring, normalise)


def num_experts(config: JsonObject) -> int:
    """By any of the names that configurations give it."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if (count := config.optional_integer(name)) is not None:
            return count
    raise config.error("num_experts is missing")
