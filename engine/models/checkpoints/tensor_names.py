"""Names of a checkpoint's tensors: the prefixes that libraries put in front of them, and what belongs to other parts of a model."""

import re
from collections.abc import Iterable, Mapping

from engine.errors import ModelError

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Put in by torch.compile, FSDP and activation checkpointing, at any depth."""
_LEADING = re.compile(
    r"^(?:backbone\.)?(?:model\.)?(?:language_model\.)?(?:model\.)?(?=(?:embed_tokens|embeddings|layers|norm|norm_f|embedding_norm)\.)"
)
_HEAD = re.compile(r"^(?:model\.)?(?:language_model\.)?(?=lm_head\.)")
_OTHER_WORDS = {"model.embeddings.weight": "model.embed_tokens.weight", "model.norm_f.weight": "model.norm.weight"}
"""Mamba's, which Nemotron-H has taken over."""
_OTHER_MODALITIES = re.compile(
    r"^(?:model\.)?(?:visual|vision_tower|vision_model|vision_encoder|multi_modal_projector|image_newline|audio_tower|embed_vision)(?:\.|$)"
)


def canonical_name(stored: str) -> str:
    """The name as `…ForCausalLM` checkpoints have it: `model.layers.0.…`, `model.norm.weight`, `lm_head.weight`.

    Base models are saved without `model.`, multimodal ones with `language_model.model.` or, by transformers 5, `model.language_model.`.
    """
    name = _WRAPPERS.sub("", stored)
    if _HEAD.match(name):
        return _HEAD.sub("", name)
    name = _LEADING.sub("model.", name)
    return _OTHER_WORDS.get(name, name)


def canonical_names(stored: Iterable[str], source: str) -> Mapping[str, str]:
    """Canonical name to stored name. Raises `ModelError` where two stored tensors would be one."""
    names: dict[str, str] = {}
    for name in stored:
        canonical = canonical_name(name)
        if canonical in names:
            raise ModelError(f"{source}: weights {names[canonical]} and {name} both stand for {canonical}")
        names[canonical] = name
    return names


def is_of_other_modality(name: str) -> bool:
    """Whether a canonical name is of the part of a multimodal model that reads images or sound."""
    return _OTHER_MODALITIES.match(name) is not None
