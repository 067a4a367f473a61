"""What the families of `families.py` share: how a Llama-like decoder is read from a configuration."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.models.base import ModelConfig
from engine.models.blocks.activations import ACTIVATIONS
from engine.models.blocks.decoder_config import DecoderConfig
from engine.models.blocks.rope import DynamicRope, Rope, RotaryLayout, YarnRope
from engine.models.checkpoints.hf_config import DEFAULT_DTYPE, JsonObject
from engine.models.configuration.rope_config import partial_rotary_factor, read_rope


@dataclass(frozen=True)
class Family:
    """How the configuration of one kind of decoder is read."""

    build: Callable[[JsonObject], DecoderConfig]
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Of settings that are absent, or null where null has no meaning of its own: those of transformers 5."""
    nullable: frozenset[str] = frozenset(
        {"num_key_value_heads", "head_dim", "sliding_window", "attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping"}
    )
    applies: frozenset[str] = frozenset()
    """Of `REFUSED_SETTINGS`, those that this family reads."""


Ropes = tuple[tuple[Rope, ...], tuple[int | None, ...]]
"""The ropes of a model, and per layer which of them it uses, if any."""


def one_rope(config: JsonObject, rotary_dim: int, windows: Sequence[int | None]) -> Ropes:
    return (read_rope(config, rotary_dim),), (0,) * len(windows)


def read_windows(config: JsonObject, sliding: list[bool], *, may_differ: bool = True) -> tuple[int | None, ...]:
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


def expect(config: JsonObject, name: str, *values: object) -> None:
    """Refuses a setting that isn't absent or one of `values`: this family computes nothing else."""
    if config.get(name) is not None and config.get(name) not in values:
        raise config.error(f"{name} = {config.get(name)!r} is not supported")


def num_layers(config: JsonObject) -> int:
    return config.integer("num_hidden_layers")


def read_decoder(
    config: JsonObject,
    windows: tuple[int | None, ...],
    *,
    activation: str = "hidden_act",
    norm_eps: str = "rms_norm_eps",
    rope_reader: Callable[[JsonObject, int, Sequence[int | None]], Ropes] = one_rope,
    interleaved: bool = False,
) -> DecoderConfig:
    """What all families share; `activation` and `norm_eps` are names of settings, `interleaved` pairs neighbours for the rotation."""
    num_heads, num_kv_heads, head_dim = _heads(config)
    rotary = RotaryLayout(int(head_dim * partial_rotary_factor(config)), interleaved)
    if rotary.dim % 2:
        raise config.error(f"partial_rotary_factor: {rotary.dim} of {head_dim} dimensions would be rotated, which is odd")
    ropes, rope_of_layer = rope_reader(config, rotary.dim, windows)
    return DecoderConfig(
        model=_model_config(config, ropes),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        activation=_activation(config, activation),
        norm_eps=config.number(norm_eps, 1e-6),
        attention_scale=head_dim**-0.5,
        windows=windows,
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        rotary=rotary,
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
        num_layers=num_layers(config),
        hidden_size=config.integer("hidden_size"),
        vocab_size=config.integer("vocab_size"),
        max_model_len=max([config.integer("max_position_embeddings"), *named]),
        eos_token_ids=(),
        checkpoint_dtype=DEFAULT_DTYPE,
        extendable=any(isinstance(rope, DynamicRope) for rope in ropes),
    )


def no_windows(config: JsonObject) -> tuple[int | None, ...]:
    return read_windows(config, [False] * num_layers(config), may_differ=False)


def with_attention_bias(decoder: DecoderConfig, config: JsonObject) -> DecoderConfig:
    bias = config.flag("attention_bias", False)
    return replace(decoder, qkv_bias=bias, output_bias=bias)
