"""Families with recurrent layers beside attention: each builder maps a checkpoint's configuration to a `DecoderConfig`."""

from dataclasses import replace

from engine.models.blocks.decoder_config import (
    AttentionNames,
    DecoderConfig,
    DeltaNetConfig,
    ExpertsConfig,
    MLPNames,
    NormNames,
    QKNorm,
    SharedExpert,
    ShortConvConfig,
)
from engine.models.checkpoints.hf_config import JsonObject
from engine.models.configuration.family import num_layers, read_decoder, with_attention_bias
from engine.models.configuration.sparse import qwen_experts


def qwen3_next(config: JsonObject) -> DecoderConfig:
    return replace(_delta_net(config), experts=_gated_experts(config))


def qwen3_5(config: JsonObject) -> DecoderConfig:
    return _delta_net(config)


def qwen3_5_moe(config: JsonObject) -> DecoderConfig:
    """All layers are sparse, and weights are always normalised."""
    experts = _gated_experts(config.with_values(decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True))
    return replace(_delta_net(config), experts=experts)


def lfm2(config: JsonObject) -> DecoderConfig:
    """Its MLPs are narrower than the configuration says, unless that says otherwise."""
    if config.get("layer_types") is None and isinstance(full := config.get("full_attn_idxs"), list):
        config = config.with_values(layer_types=["full_attention" if layer in full else "conv" for layer in range(num_layers(config))])
    conv = _layers_of(config, "conv")
    if (tied := config.get("tie_embedding")) is not None:
        config = config.with_values(tie_word_embeddings=tied)
    size = config.integer("block_ff_dim", config.integer("intermediate_size"))
    if config.flag("block_auto_adjust_ff_dim", True):
        multiple = config.integer("block_multiple_of")
        size = -(-int(config.number("block_ffn_dim_multiplier") * int(2 * size / 3)) // multiple) * multiple
    decoder = read_decoder(_only_attention(config), (None,) * num_layers(config), norm_eps="norm_eps")
    return replace(
        decoder,
        intermediate_size=size,
        qk_norm=QKNorm.HEAD,
        attention=AttentionNames("out_proj", "q_layernorm", "k_layernorm"),
        recurrent=ShortConvConfig(config.integer("conv_L_cache"), config.flag("conv_bias", False)),
        recurrent_layers=conv,
        norms=NormNames("operator_norm", None, "ffn_norm"),
        mlp=MLPNames("w3", "w2", "w1", "feed_forward"),
        final_norm="model.embedding_norm",
    )


def _delta_net(config: JsonObject) -> DecoderConfig:
    """Where the configuration doesn't say which layers have attention, every fourth has."""
    count, interval = num_layers(config), config.integer("full_attention_interval")
    if config.get("layer_types") is None:
        kinds = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(count)]
        config = config.with_values(layer_types=kinds)
    linear = _layers_of(config, "linear_attention")
    net = DeltaNetConfig(
        config.integer("linear_num_key_heads"),
        config.integer("linear_num_value_heads"),
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim"),
    )
    if net.num_value_heads % net.num_key_heads:
        raise config.error(f"linear_num_value_heads ({net.num_value_heads}) must be a multiple of linear_num_key_heads")
    decoder = with_attention_bias(read_decoder(_only_attention(config), (None,) * count), config)
    return replace(
        decoder,
        qk_norm=QKNorm.HEAD,
        attention_gate=config.flag("attn_output_gate", True),
        norm_adds_one=True,
        recurrent=net,
        recurrent_layers=linear,
        mtp_prefixes=("mtp.",),
    )


def _gated_experts(config: JsonObject) -> ExpertsConfig:
    size = config.integer("shared_expert_intermediate_size")
    return replace(qwen_experts(config), shared=SharedExpert("shared_expert", size, gated=True))


def _layers_of(config: JsonObject, kind: str) -> frozenset[int]:
    """Layers that aren't `full_attention`; `layer_types` names one of the two for each."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers(config) or not set(kinds) <= {"full_attention", kind}:
        raise config.error(f"layer_types must name full_attention or {kind} for every layer")
    return frozenset(layer for layer, named in enumerate(kinds) if named == kind)


def _only_attention(config: JsonObject) -> JsonObject:
    return config.with_values(layer_types=None, sliding_window=None)
