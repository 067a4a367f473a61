"""Families with recurrent layers beside attention: each builder maps a checkpoint's configuration to a `DecoderConfig`."""

from dataclasses import replace

from engine.models.blocks.decoder_config import (
    AttentionNames,
    DecoderConfig,
    DeltaNetConfig,
    ExpertsConfig,
    MambaConfig,
    MLPNames,
    NormNames,
    QKNorm,
    SharedExpert,
    ShortConvConfig,
)
from engine.models.checkpoints.hf_config import JsonObject
from engine.models.configuration.dense import with_multipliers
from engine.models.configuration.family import expect, num_layers, read_decoder, with_attention_bias
from engine.models.configuration.sparse import deepseek_experts, qwen_experts, read_experts


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


def granite4(config: JsonObject) -> DecoderConfig:
    """Attention rotates only where the configuration says so; without experts all rows go through the shared MLP alone."""
    config = config.with_values(layer_types=_renamed(config.get("layer_types")))
    if config.get("layer_types") is None:
        config = config.with_values(layer_types=["linear_attention"] * num_layers(config))
    recurrent = _layers_of(config, "linear_attention")
    heads, inner = config.integer("mamba_n_heads"), config.integer("mamba_expand") * config.integer("hidden_size")
    if config.get("mamba_d_head") in (None, "auto"):
        config = config.with_values(mamba_d_head=inner // heads)
    mamba = MambaConfig(
        heads,
        config.integer("mamba_d_head"),
        config.integer("mamba_d_state"),
        config.integer("mamba_n_groups"),
        config.integer("mamba_d_conv"),
        config.flag("mamba_conv_bias", True),
        config.flag("mamba_proj_bias", False),
        _step_limits(config),
        "mamba",
    )
    _check_mamba(config, mamba)
    count, size = num_layers(config), config.integer("shared_intermediate_size")
    decoder = with_multipliers(with_attention_bias(read_decoder(_only_attention(config), (None,) * count), config), config)
    rotates = config.text("position_embedding_type", "") == "rope"
    experts = None
    if config.count("num_local_experts", 0):
        experts = read_experts(config, "intermediate_size", frozenset(range(count)), normalise=True)
        experts = replace(experts, router="router.layer", shared=SharedExpert("shared_mlp", size, in_layer=True))
    return replace(
        decoder,
        intermediate_size=size,
        rope_of_layer=((0 if rotates else None),) * count,
        recurrent=mamba,
        recurrent_layers=recurrent,
        mlp=MLPNames(down="output_linear", prefix="shared_mlp", fused="input_linear"),
        experts=experts,
    )


def nemotron_h(config: JsonObject) -> DecoderConfig:
    """Layers are halves: each is a Mamba layer, attention that doesn't rotate, an MLP, or experts."""
    for name, value in (("residual_in_fp32", False), ("mamba_hidden_act", "silu"), ("sliding_window", None)):
        expect(config, name, value)
    kinds = _nemotron_layers(config)
    config = config.with_values(num_hidden_layers=len(kinds))
    if (head_dim := config.optional_integer("attention_head_dim")) is not None:
        config = config.with_values(head_dim=head_dim)
    mamba = MambaConfig(
        config.integer("mamba_num_heads"),
        config.integer("mamba_head_dim"),
        config.integer("ssm_state_size"),
        config.integer("n_groups"),
        config.integer("conv_kernel"),
        config.flag("use_conv_bias", True),
        config.flag("use_bias", False),
        (config.number("time_step_min"), float("inf")),
        "mixer",
    )
    _check_mamba(config, mamba)
    decoder = read_decoder(_only_attention(config), (None,) * len(kinds), activation="mlp_hidden_act", norm_eps="layer_norm_epsilon")
    sparse, dense = _numbers(kinds, "moe"), _numbers(kinds, "mlp")
    experts = None
    if sparse:
        size = config.integer("moe_shared_expert_intermediate_size")
        experts = replace(
            deepseek_experts(config.with_values(first_k_dense_replace=0)),
            layers=sparse,
            gated=False,
            latent_size=config.optional_integer("moe_latent_size"),
            shared=SharedExpert("shared_experts", size),
        )
    return replace(
        decoder,
        mlp_bias=config.flag("mlp_bias", False),
        rope_of_layer=(None,) * len(kinds),
        recurrent=mamba,
        recurrent_layers=_numbers(kinds, "linear_attention"),
        without_mixer=sparse | dense,
        without_mlp=frozenset(range(len(kinds))) - sparse - dense,
        attention=AttentionNames(prefix="mixer"),
        mlp=MLPNames(gate=None, prefix="mixer"),
        norms=NormNames("norm", None, "norm"),
        norm_in_float32=True,
        experts=experts,
        mtp_prefixes=("mtp.",),
    )


_NEMOTRON_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _nemotron_layers(config: JsonObject) -> list[str]:
    """By `layers_block_type`, or by a letter for each layer."""
    kinds, pattern = _renamed(config.get("layers_block_type")), config.text("hybrid_override_pattern", "")
    if kinds is None:
        kinds = [_NEMOTRON_LETTERS.get(letter) for letter in pattern]
    if not isinstance(kinds, list) or not kinds or not set(kinds) <= set(_NEMOTRON_LETTERS.values()):
        raise config.error("layers_block_type must name linear_attention, full_attention, mlp or moe for every layer")
    return [str(kind) for kind in kinds]


def _renamed(kinds: object) -> object:
    """Layer types by the names that transformers 5 gives them."""
    names = {"mamba": "linear_attention", "attention": "full_attention"}
    return [names.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds] if isinstance(kinds, list) else kinds


def _numbers(kinds: list[str], kind: str) -> frozenset[int]:
    return frozenset(layer for layer, named in enumerate(kinds) if named == kind)


def _step_limits(config: JsonObject) -> tuple[float, float]:
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0, float("inf")
    # As transformers writes what JSON has no number for.
    numbers = [limit.get("__float__") if isinstance(limit, dict) else limit for limit in limits] if isinstance(limits, list) else []
    try:
        low, high = (float(str(number)) for number in numbers)
    except ValueError:
        raise config.error("time_step_limit must be two numbers") from None
    return low, high


def _check_mamba(config: JsonObject, mamba: MambaConfig) -> None:
    if mamba.num_heads % mamba.num_groups:
        raise config.error(f"{mamba.num_heads} Mamba heads can't be shared out over {mamba.num_groups} groups")


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
