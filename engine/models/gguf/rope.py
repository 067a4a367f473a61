"""Rotary scaling in GGUF files, as llama.cpp reads it, in the form of a Hugging Face configuration."""

import math
from collections.abc import Sequence
from typing import Any

from engine.models.gguf.settings import GGUFSettings, shortest


def rope_scaling(settings: GGUFSettings, context: int, factors: Sequence[float] | None) -> dict[str, Any] | None:
    """`rope_scaling` of config.json; None for plain rotary embeddings.

    `factors` are those of the tensor `rope_freqs.weight` (Llama 3.1 and later): a divisor per frequency, in both of longrope's lists.
    A file with a factor and no type is scaled linearly, as in llama.cpp. Raises `ModelError` for what isn't built.
    """
    factor = settings.number("rope.scaling.factor", 0.0) or settings.number("rope.scale_linear", 0.0)
    kind = settings.get("rope.scaling.type", str, "linear" if factor else "none")
    original = settings.get("rope.scaling.original_context_length", int, 0)
    if kind not in ("none", "linear", "yarn"):
        raise settings.error(f"rope scaling {kind!r} is not supported; linear and yarn are")
    scaling: dict[str, Any] | None
    if kind == "yarn":
        scaling = _yarn(settings, factor, original)
    else:
        settings.refuse_unless("rope.scaling.attn_factor", 0, 1)
        settings.refuse_unless("rope.scaling.yarn_log_multiplier", 0)
        scaling = {"rope_type": "linear", "factor": factor} if kind == "linear" and factor not in (0, 1) else None
    if factors is None:
        return scaling
    if scaling is not None:
        raise settings.error("rope_freqs.weight beside another rope scaling is not supported")
    divisors = [shortest(value) for value in factors]
    both = {"short_factor": divisors, "long_factor": divisors}
    return {"rope_type": "longrope", **both, "factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": context}


def _yarn(settings: GGUFSettings, factor: float, original: int) -> dict[str, Any]:
    if not factor:
        raise settings.error("rope scaling 'yarn' lacks rope.scaling.factor")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if original:
        scaling["original_max_position_embeddings"] = original
    attention = settings.number("rope.scaling.attn_factor", 1.0)
    if attention not in (0.0, 1.0):
        # llama.cpp multiplies YaRN's own factor by it; transformers takes the product.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    for key in ("beta_fast", "beta_slow"):
        if settings.has(f"rope.scaling.yarn_{key}"):
            scaling[key] = settings.number(f"rope.scaling.yarn_{key}")
    settings.refuse_unless("rope.scaling.yarn_log_multiplier", 0)
    settings.refuse_unless("rope.scaling.yarn_attn_factor", 1)
    settings.refuse_unless("rope.scaling.yarn_ext_factor", 1, -1)
    return scaling
