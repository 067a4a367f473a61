"""The tokens that are put around a text, against transformers' reading of the same model folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, GemmaTokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from service.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = {piece: token_id for token_id, piece in enumerate(["<pad>", "<s>", "</s>", "<unk>", "<mask>", *BYTES, "▁", "a", "b"])}
LETTERS = {piece: token_id for token_id, piece in enumerate(["<s>", "</s>", "Ġ", "a", "b"])}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def _llama() -> Any:  # noqa: ANN401  # transformers' tokenizers have no common type that says what they do
    return LlamaTokenizer(vocab=PIECES, merges=[], **NAMES)


def _gemma() -> Any:  # noqa: ANN401
    return GemmaTokenizer(vocab=PIECES, merges=[], **NAMES)


def _qwen2() -> Any:  # noqa: ANN401
    return Qwen2Tokenizer(vocab=LETTERS, merges=[], unk_token="</s>", pad_token="</s>", **NAMES)


def _plain() -> Any:  # noqa: ANN401
    return PreTrainedTokenizerFast(tokenizer_object=_qwen2().backend_tokenizer, **NAMES)


@pytest.mark.parametrize("make", [_llama, _gemma, _qwen2, _plain])
@pytest.mark.parametrize("template", [None, "$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("add_eos", [None, True])
def test_a_text_gets_the_tokens_of_tokenizer_json_whatever_the_configuration_says(
    make: Callable[[], Any], template: str | None, add_bos: bool | None, add_eos: bool | None, tmp_path: Path
) -> None:
    made = make()
    _save(made, template, {"add_bos_token": add_bos, "add_eos_token": add_eos}, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert type(theirs).__name__ in (type(made).__name__, "TokenizersBackend")
    for text in ("a b", "", "<s>a</s>", " b a"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    begins = template is not None and template.startswith("<s>")
    assert (ours.encode("a b")[0] == ours.bos_id) is begins  # neither library lets a flag decide


def _save(tokenizer: Any, template: str | None, flags: dict[str, bool | None], folder: Path) -> None:  # noqa: ANN401
    backend = tokenizer.backend_tokenizer
    specials = [(name, backend.token_to_id(name)) for name in NAMES.values()]
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    backend.post_processor = processors.TemplateProcessing(single=template or "$A", special_tokens=specials)
    content = json.loads(backend.to_str())
    if template is None:
        content["post_processor"] = None
    file.write_text(json.dumps(content))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {name: flag for name, flag in flags.items() if flag is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
