"""Rotary settings of a checkpoint, in the hub's form (`rope_theta`, `rope_scaling`) and in transformers 5's (`rope_parameters`)."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.models.blocks.rope import (
    DefaultRope,
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    Rope,
    YarnRope,
    longrope_attention_factor,
    yarn_attention_factor,
    yarn_magnitude,
)
from engine.models.checkpoints.hf_config import JsonObject

_COMMON_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "factor"}
_YARN_KEYS = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned", "attention_factor"}
_MROPE_KEYS = {"mrope_section", "mrope_interleaved"}
"""Of multimodal models: how a head's dimensions are shared among time, height and width, which are one number in a text."""
_OTHER_KEYS = {"short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
KNOWN_KEYS = _COMMON_KEYS | _YARN_KEYS | _MROPE_KEYS | _OTHER_KEYS
"""A key outside these may change the angles in a way that isn't built, so it is refused; of these, a variant reads its own."""


@dataclass(frozen=True)
class RopeSettings:
    """One rope entry with what it falls back to."""

    entry: JsonObject
    theta: float
    head_dim: int
    max_positions: int
    outer_original_length: int | None = None
    """`original_max_position_embeddings` beside the entry, as Phi configurations have it; it goes before the entry's own."""

    @property
    def names_original_length(self) -> bool:
        return self.outer_original_length is not None or self.entry.get("original_max_position_embeddings") is not None

    @property
    def original_length(self) -> int:
        return self.outer_original_length or self.entry.integer("original_max_position_embeddings", self.max_positions)


def partial_rotary_factor(config: JsonObject) -> float:
    """The share of a head's dimensions that are rotated, beside the rope's settings or among them."""
    entry = config.child("rope_scaling") or config.child("rope_parameters") or JsonObject(config.source, {})
    factor = entry.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if factor > 1:
        raise config.error(f"partial_rotary_factor ({factor}) must be at most 1")
    return factor


def yarn_score_scale(config: JsonObject) -> float:
    """What latent attention multiplies its scores by, besides the square root of a head's width: (0.1 m ln(factor) + 1)^2, where the
    settings name m as `mscale_all_dim` (DeepSeek)."""
    entry = config.child("rope_scaling") or config.child("rope_parameters")
    if entry is None or entry.text("rope_type", entry.text("type", "default")) == "default":
        return 1.0
    coefficient = entry.optional_number("mscale_all_dim")
    return 1.0 if coefficient is None else yarn_magnitude(entry.number("factor"), coefficient) ** 2


def read_rope(config: JsonObject, head_dim: int, *, default_theta: float = 10_000.0) -> Rope:
    """The rope of a model that has one for all layers."""
    entry = config.child("rope_scaling") or config.child("rope_parameters") or JsonObject(config.source, {})
    theta = config.number("rope_theta", default_theta)
    outer = config.optional_integer("original_max_position_embeddings")
    return build_rope(RopeSettings(entry, theta, head_dim, config.integer("max_position_embeddings"), outer))


def read_ropes_by_layer_type(config: JsonObject, head_dim: int, *, global_theta: float, local_theta: float) -> dict[str, Rope]:
    """The ropes of a model that has one for full and one for sliding attention (Gemma 3).

    The hub's form names the thetas `rope_theta` and `rope_local_base_freq`, and its `rope_scaling` is of the full layers only.
    """
    nested = config.child("rope_parameters") or JsonObject(config.source, {})
    unknown = sorted(set(nested.values) - {"full_attention", "sliding_attention"})
    if unknown:
        raise nested.error(f"{unknown[0]} is not a layer type; expected are full_attention and sliding_attention")
    empty = JsonObject(config.source, {})
    full = nested.child("full_attention") or empty
    if scaling := config.child("rope_scaling"):
        full = JsonObject(scaling.source, {**full.values, **scaling.values})
    length = config.integer("max_position_embeddings")
    global_theta = config.number("rope_theta", global_theta)
    local_theta = config.number("rope_local_base_freq", local_theta)
    sliding = nested.child("sliding_attention") or empty
    for entry in (full, sliding):
        if entry.number("partial_rotary_factor", 1.0) != 1.0:
            raise entry.error("partial_rotary_factor other than 1 is not supported")
    return {
        "full_attention": build_rope(RopeSettings(full, global_theta, head_dim, length)),
        "sliding_attention": build_rope(RopeSettings(sliding, local_theta, head_dim, length)),
    }


def build_rope(settings: RopeSettings) -> Rope:
    """Raises `ModelError` for a variant or a key that isn't built."""
    entry = settings.entry
    if entry.get("attn_factor") is not None:
        raise entry.error(_ambiguous_attention_factor(entry))
    unknown = sorted(set(entry.values) - KNOWN_KEYS)
    if unknown:
        raise entry.error(f"rope setting {unknown[0]} is not supported")
    kind = entry.text("rope_type", entry.text("type", "default"))
    if kind not in _READERS:
        raise entry.error(f"rope type {kind} is not supported; supported are {', '.join(_READERS)}")
    return _READERS[kind](settings, entry.number("rope_theta", settings.theta))


def _ambiguous_attention_factor(entry: JsonObject) -> str:
    """DeepSeek-R1-0528-Qwen3-8B has the setting: its rows depend on who reads it, and only the user knows whose are wanted."""
    applied = entry.number("attn_factor") * yarn_attention_factor(entry.number("factor", 1.0), None, None)
    return (
        "attn_factor is read in two ways: transformers ignores it, vLLM multiplies the attention factor by it. Remove it for rows as "
        f"transformers computes them, or replace it with attention_factor: {round(applied, 12)} for those of vLLM"
    )


def _default(settings: RopeSettings, theta: float) -> Rope:
    return DefaultRope(theta)


def _linear(settings: RopeSettings, theta: float) -> Rope:
    return LinearRope(theta, settings.entry.number("factor"))


def _dynamic(settings: RopeSettings, theta: float) -> Rope:
    return DynamicRope(theta, settings.entry.number("factor"), settings.max_positions)


def _yarn(settings: RopeSettings, theta: float) -> Rope:
    entry, original = settings.entry, settings.original_length
    factor = entry.number("factor", settings.max_positions / original)
    derived = yarn_attention_factor(factor, entry.optional_number("mscale"), entry.optional_number("mscale_all_dim"))
    return YarnRope(
        theta,
        factor,
        original,
        attention_factor=entry.number("attention_factor", derived),
        beta_fast=entry.number("beta_fast", 32.0),
        beta_slow=entry.number("beta_slow", 1.0),
        truncate=entry.flag("truncate", True),
        context_length=int(factor * original) if settings.names_original_length else None,
    )


def _llama3(settings: RopeSettings, theta: float) -> Rope:
    entry = settings.entry
    low, high = entry.number("low_freq_factor"), entry.number("high_freq_factor")
    if high <= low:
        raise entry.error(f"high_freq_factor ({high}) must be above low_freq_factor ({low})")
    return Llama3Rope(theta, entry.number("factor"), low, high, settings.original_length)


def _longrope(settings: RopeSettings, theta: float) -> Rope:
    entry, original = settings.entry, settings.original_length
    short, long = entry.numbers("short_factor"), entry.numbers("long_factor")
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if len(factors) != settings.head_dim // 2:
            raise entry.error(f"{name} must have {settings.head_dim // 2} numbers, not {len(factors)}")
    factor = entry.number("factor", settings.max_positions / original)
    attention_factor = entry.number("attention_factor", longrope_attention_factor(factor, original))
    return LongRope(theta, short, long, original, attention_factor)


_READERS: dict[str, Callable[[RopeSettings, float], Rope]] = {
    "default": _default,
    "mrope": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
