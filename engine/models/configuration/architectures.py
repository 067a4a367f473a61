"""Which decoder a checkpoint's configuration is of: by its class, its model type, and the text part of a multimodal model."""

from collections.abc import Mapping

from engine.errors import ModelError
from engine.models.checkpoints.hf_config import JsonObject

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Exaone4ForCausalLM": "exaone4",
    "Cohere2ForCausalLM": "cohere2",
    "Starcoder2ForCausalLM": "starcoder2",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "Glm4MoeForCausalLM": "glm4_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Lfm2ForCausalLM": "lfm2",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "NemotronHForCausalLM": "nemotron_h",
    "Llama4ForCausalLM": "llama4",
    "GptOssForCausalLM": "gpt_oss",
    # Base models: the same decoder, saved without its head.
    "LlamaModel": "llama",
    "MistralModel": "mistral",
    "Qwen2Model": "qwen2",
    "Qwen3Model": "qwen3",
    "Gemma2Model": "gemma2",
    "Gemma3TextModel": "gemma3",
    "Phi3Model": "phi3",
    "SmolLM3Model": "smollm3",
    "GraniteModel": "granite",
    "Olmo2Model": "olmo2",
    "Olmo3Model": "olmo3",
    "Exaone4Model": "exaone4",
    "Cohere2Model": "cohere2",
    "Starcoder2Model": "starcoder2",
    "GlmModel": "glm",
    "Glm4Model": "glm4",
    "Qwen2MoeModel": "qwen2_moe",
    "Qwen3MoeModel": "qwen3_moe",
    "MixtralModel": "mixtral",
    "Glm4MoeModel": "glm4_moe",
    "MiniMaxM2Model": "minimax_m2",
    "DeepseekV2Model": "deepseek_v2",
    "DeepseekV3Model": "deepseek_v3",
    "Glm4MoeLiteModel": "glm4_moe_lite",
    "Qwen3NextModel": "qwen3_next",
    "Lfm2Model": "lfm2",
    "Qwen3_5TextModel": "qwen3_5",
    "Qwen3_5MoeTextModel": "qwen3_5_moe",
    "GraniteMoeHybridModel": "granitemoehybrid",
    "NemotronHModel": "nemotron_h",
    "Llama4TextModel": "llama4",
    "GptOssModel": "gpt_oss",
    # The spelling of the first Llama conversions.
    "LLaMAForCausalLM": "llama",
    # Multimodal models, of which only the text part runs.
    "Gemma3ForConditionalGeneration": "gemma3",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Llama4ForConditionalGeneration": "llama4",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
"""Class in `architectures` to family."""

MODEL_TYPES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "exaone4": "exaone4",
    "cohere2": "cohere2",
    "starcoder2": "starcoder2",
    "glm": "glm",
    "glm4": "glm4",
    "qwen2_moe": "qwen2_moe",
    "qwen3_moe": "qwen3_moe",
    "mixtral": "mixtral",
    "glm4_moe": "glm4_moe",
    "minimax_m2": "minimax_m2",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "glm4_moe_lite": "glm4_moe_lite",
    "qwen3_next": "qwen3_next",
    "lfm2": "lfm2",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "granitemoehybrid": "granitemoehybrid",
    "nemotron_h": "nemotron_h",
    "llama4_text": "llama4",
    "llama4": "llama4",
    "gpt_oss": "gpt_oss",
    "kimi_k2": "deepseek_v3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
"""`model_type`, of the whole or of the text part, to family."""

_TIED_BY_DEFAULT = frozenset({"Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"})
_ONLY_OUTSIDE = frozenset({"vision_config", "text_config", "audio_config"})


def text_settings(config: JsonObject) -> JsonObject:
    """The settings of the decoder: `text_config` of a multimodal model, or all of a text model's.

    Qwen2-VL's configurations have the decoder's settings at the top, beside `vision_config`.
    """
    text = config.child("text_config")
    if text is not None:
        outer = {name: config.get(name) for name in ("dtype", "torch_dtype") if config.get(name) is not None}
        values = {name: value for name, value in text.values.items() if value is not None}
        return JsonObject(text.source, {**outer, **values, "tie_word_embeddings": _ties(config, text)})
    if config.get("vision_config") is not None:
        return JsonObject(config.source, {name: value for name, value in config.values.items() if name not in _ONLY_OUTSIDE})
    return config


def _ties(config: JsonObject, text: JsonObject) -> bool:
    """Of a multimodal model, whose head belongs to the whole: as transformers reads it, with the older place inside `text_config`."""
    architectures = config.get("architectures")
    default = isinstance(architectures, list) and not _TIED_BY_DEFAULT.isdisjoint(map(str, architectures))
    return config.flag("tie_word_embeddings", default) or text.flag("tie_word_embeddings", False)


def find_family(config: JsonObject) -> tuple[str, str]:
    """The architecture's name and its family.

    Raises `ModelError` for one that isn't supported, and where class and model type are of different families: they differ in
    defaults, and nothing says which of the two the weights were made for.
    """
    names = config.get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else None
    types = {name: _type_family(part) for name, part in _typed_parts(config).items()}
    by_class = None if named is None else ARCHITECTURES.get(named)
    families = {*types.values(), *([] if named is None else [by_class])}
    if not families or (named is not None and by_class is None):
        raise _unsupported(config, named or "unnamed")
    if None in families:
        raise _unsupported(config, next(name for name, family in types.items() if family is None))
    if len(families) > 1:
        raise config.error(f"architectures names {named}, but model_type is {', '.join(types)}: these compute differently")
    family = str(families.pop())
    return named or next(name for name, of in ARCHITECTURES.items() if of == family), family


def _typed_parts(config: JsonObject) -> dict[str, JsonObject]:
    parts = [config] if (text := config.child("text_config")) is None else [config, text]
    return {part.text("model_type", ""): part for part in parts if part.get("model_type") is not None}


def _type_family(part: JsonObject) -> str | None:
    return MODEL_TYPES.get(part.text("model_type", ""))


def _unsupported(config: JsonObject, found: str) -> ModelError:
    return config.error(f"architecture {found} is not supported; supported are {', '.join(ARCHITECTURES)}")
