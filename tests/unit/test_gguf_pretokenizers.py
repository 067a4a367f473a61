"""What a pre-tokenizer's name in a GGUF file decides: the words, whether merges count, and the begin token."""

from typing import Any

import pytest
from tokenizers import pre_tokenizers

from engine.errors import ModelError
from engine.models.gguf.file import GGUFMetadata
from engine.models.gguf.pretokenizers import PRE_TOKENIZERS
from engine.models.gguf.tokenizer import build_tokenizer, tokenizer_config

TEXT = "Hello World's 12345 (ÉCOLE/straßeÉ) d'Été\t\r\n  x\n\n中文…です १२ a\u0301b  "
TOKENS = ["<bos>", "<eos>", "<unk>", *"abcdĠ", "ab", "abc"]
NORMAL, UNKNOWN, CONTROL = 1, 2, 3


def _words(name: str, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]


def _metadata(pre: str | None, **changes: Any) -> GGUFMetadata:  # noqa: ANN401
    values = {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    if pre is not None:
        values["tokenizer.ggml.pre"] = pre
    return GGUFMetadata(values | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}, "tiny.gguf")


def _pieces(metadata: GGUFMetadata, text: str) -> list[str]:
    pieces: list[str] = build_tokenizer(metadata).encode(text).tokens
    return pieces


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_no_pre_tokenizer_loses_a_character(name: str) -> None:
    assert "".join(_words(name, TEXT)) == TEXT
    assert len(_words(name, TEXT)) > 10


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("llama-bpe", "it'S 12345 ok\n\n x", ["it", "'S", " ", "123", "45", " ok", "\n\n", " x"]),
        ("qwen2", "it'S 123 (a)\n", ["it", "'S", " ", "1", "2", "3", " (", "a", ")\n"]),
        ("qwen2", "x a\u0301b", ["x", " a", "\u0301b"]),
        ("qwen35", "x a\u0301b", ["x", " a\u0301b"]),
        ("tekken", "d'Été straßeÉ ABC a/\n12", ["d", "'Été", " straße", "É", " ABC", " a", "/\n", "1", "2"]),
        ("gpt-4o", "it's DON'T 1234", ["it's", " DON'T", " ", "123", "4"]),
        ("gpt-2", "it's 12345  x", ["it", "'s", " 12345", " ", " x"]),
        ("smollm", "it's 12  x", ["it", "'s", " ", "1", "2", " ", " x"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
        ("deepseek-llm", "Ab 12\n中文です", ["Ab", " ", "12", "\n", "中文です"]),
        ("deepseek-coder", "Ab 12\n中文", ["Ab", " ", "1", "2", "\n", "中文"]),
        ("deepseek-v3", "x(y 1234中文です", ["x", "(y", " ", "123", "4", "中文です"]),
        ("seed-coder", "(a)\n", ["(a", ")", "\n"]),
        ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
        ("viking", "ab 12, c", ["ab", " ", "1", "2", ",", " c"]),
    ],
)
def test_a_text_is_cut_as_the_name_says(name: str, text: str, words: list[str]) -> None:
    assert _words(name, text) == words


def test_where_merges_are_ignored_a_word_of_the_vocabulary_is_one_token() -> None:
    assert _pieces(_metadata("llama-bpe", add_bos_token=False), "abc") == ["abc"]
    assert _pieces(_metadata("tekken", add_bos_token=False), "abc abcd") == ["abc", "Ġ", "ab", "c", "d"]
    assert _pieces(_metadata("qwen2"), "abc") == ["ab", "c"]


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False), ("glm4", False)])
def test_the_name_decides_on_the_begin_token_where_the_file_does_not(pre: str, begins: bool) -> None:
    assert _pieces(_metadata(pre), "a") == (["<bos>", "a"] if begins else ["a"])
    assert tokenizer_config(_metadata(pre))["add_bos_token"] is begins
    assert _pieces(_metadata(pre, add_bos_token=not begins), "a") == (["a"] if begins else ["<bos>", "a"])


def test_the_unknown_token_is_found_in_a_text_as_in_llama_cpp() -> None:
    assert _pieces(_metadata("qwen2"), "a<unk>b") == ["a", "<unk>", "b"]
    assert build_tokenizer(_metadata("qwen2")).get_added_tokens_decoder()[2].special


@pytest.mark.parametrize("pre", ["kimi-k2", "gemma4", "no such name"])
def test_a_name_that_is_not_known_is_refused_with_those_that_are(pre: str) -> None:
    with pytest.raises(ModelError, match=rf"tiny\.gguf: the pre-tokenizer '{pre}' is not supported; known are .*llama-bpe.*tekken"):
        build_tokenizer(_metadata(pre))


def test_a_file_without_a_name_is_refused() -> None:
    with pytest.raises(ModelError, match=r"lacks the metadata key tokenizer\.ggml\.pre"):
        build_tokenizer(_metadata(None))


@pytest.mark.parametrize("kind", ["bert", "t5", "gemma4", "rwkv"])
def test_another_kind_of_tokenizer_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match=f"tokenizers of kind '{kind}' are not supported; gpt2 and llama are"):
        build_tokenizer(_metadata("default", model=kind))


def test_digits_are_cut_off_as_before() -> None:
    before = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    assert PRE_TOKENIZERS["smollm"].build().pre_tokenize_str(TEXT) == before.pre_tokenize_str(TEXT)
