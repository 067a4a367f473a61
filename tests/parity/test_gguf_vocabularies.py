"""Tokenizers of GGUF files by their pre-tokenizer's name, against llama.cpp's own test vectors and against transformers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from engine.errors import ModelError
from engine.models.gguf.pretokenizers import PRE_TOKENIZERS
from engine.models.gguf.tokenizer import build_tokenizer
from tests.parity.test_gguf_tokenizer import CORPUS
from tests.parity.vocabularies import VOCABULARIES, Vocabulary, vocabularies

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cn"]) | st.sampled_from("  \n\n\t\r1290aeAEîÉßſ中😀'/"), max_size=40)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return vocabularies()
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def mapping() -> ModuleType:
    """transformers' own reading of GGUF tokenizers."""
    module: ModuleType = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping", reason="transformers is too old")
    return module


def _vocabulary(folder: Path, name: str) -> Vocabulary:
    return Vocabulary(folder / f"ggml-vocab-{name}.gguf")


@pytest.mark.parametrize("name", VOCABULARIES)
def test_texts_encode_as_llama_cpp_expects(name: str, folder: Path) -> None:
    vocabulary = _vocabulary(folder, name)
    tokenizer = build_tokenizer(vocabulary.metadata())
    expected = vocabulary.expected()
    assert len(expected) >= 47
    for text, ids in expected:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids


@pytest.mark.parametrize(("name", "architecture"), [("llama-bpe", "llama"), ("qwen2", "qwen2")])
def test_texts_encode_as_transformers_reads_the_same_file(name: str, architecture: str, folder: Path, mapping: ModuleType) -> None:
    metadata = _vocabulary(folder, name).metadata()
    ours = build_tokenizer(metadata)
    theirs, _ = mapping.convert_gguf_tokenizer(architecture, _as_transformers_reads(metadata.values))
    for text in CORPUS:
        if "<|endoftext|>" in text:
            continue  # GPT-2's own token, which transformers adds to every byte-level vocabulary
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids


def _as_transformers_reads(values: Any) -> dict[str, Any]:  # noqa: ANN401
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens", "token_type": "token_type", "merges": "merges"}
    return {name: values[f"tokenizer.ggml.{key}"] for key, name in names.items()}


@pytest.mark.parametrize("name", ["llama-bpe", "dbrx", "qwen2", "megrez", "qwen35", "tekken", "gpt-4o", "minimax-m2"])
@settings(deadline=None, max_examples=200)
@given(text=TEXT)
def test_words_are_those_of_transformers(name: str, text: str, mapping: ModuleType) -> None:
    splits = [pre_tokenizers.Split(Regex(mapping.GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")]
    theirs = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    assert PRE_TOKENIZERS[name].build().pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_llama_3_texts_begin_with_bos_where_the_file_does_not_say(folder: Path) -> None:
    metadata = _vocabulary(folder, "llama-bpe").metadata()
    assert "tokenizer.ggml.add_bos_token" not in metadata.values
    assert build_tokenizer(metadata).encode("Hello").ids == [128000, 9906]
