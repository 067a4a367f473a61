"""A small random model with the tokenizer of a real one: its steps are short, so that what comes on top of them can be seen."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 8192


def write_small_model(folder: Path, vocab_size: int, tokenizer_of: Path, width: int = 256, layers: int = 4, context: int = CONTEXT) -> None:
    """A Llama of `width` (a multiple of 64), `layers` and `context`, with the tokenizer files of the model folder `tokenizer_of`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    weights = LlamaForCausalLM(config).state_dict()
    del weights["lm_head.weight"]  # the embeddings', being tied
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer_of / name).exists():
            shutil.copy(tokenizer_of / name, folder / name)
