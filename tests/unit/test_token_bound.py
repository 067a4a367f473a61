"""No text has fewer tokens than its characters tell; what can't be told of a tokenizer isn't claimed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from engine.models.checkpoints.source import default_cache, resolve_model
from service.text.token_bound import TokenBound, token_bound
from service.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACES = " \t\n\r\x0b\x0c\x1c\x85\u2003\u3000"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("e\u0301α\u0313\u0300\u0345ﬁ\x04<x>h" + SPACES), max_size=60)


def _byte_level(letters: list[str] = ALPHABET) -> Backend:
    vocab = {piece: index for index, piece in enumerate([*letters, "he", "ĠĠ"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def _composing() -> Backend:
    backend = _byte_level()
    backend.normalizer = normalizers.NFKC()
    return backend


def _without_control_characters() -> Backend:
    return _byte_level([letter for letter in ALPHABET if letter not in ("Ć", "À", "ÿ")])


def _greedy_spaces() -> Backend:
    backend = _byte_level()
    backend.add_special_tokens([AddedToken("<x>", lstrip=True, rstrip=True)])
    return backend


def _split() -> Backend:
    backend = _byte_level()
    split = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer])
    return backend


def _byte_fallback() -> Backend:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁he", "▁▁", "he"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "▁"), ("h", "e")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def _unknown_one_by_one() -> Backend:
    return Backend(models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>"))


KNOWN = [_byte_level, _composing, _without_control_characters, _greedy_spaces, _split, _byte_fallback, _unknown_one_by_one]


@pytest.mark.parametrize("make", KNOWN)
def test_no_text_has_fewer_tokens_than_its_characters_tell(make: Callable[[], Backend]) -> None:
    backend = make()
    bound = token_bound(backend)
    assert bound.most_characters is not None

    @given(TEXTS)
    @settings(max_examples=150, deadline=None)
    @example("\x04" * 50)
    @example("   <x>" * 9 + " " * 50)
    @example("α\u0313\u0300\u0345" * 20)
    @example("he" * 30)
    def check(text: str) -> None:
        assert bound.least_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)

    check()
    assert bound.least_tokens("x" * 10_000) > 1000, "and it tells something"


def test_the_embedded_model_s_tokenizer_is_known() -> None:
    source = resolve_model(None, cache=default_cache())
    tokenizer = Tokenizer.from_folder(source.folder)
    for text in ("The river carries small stones. " * 100, " " * 5000, "\x04\x13" * 100, "日本語🤷🏾‍♂️" * 50, "a\x04" * 100):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.least_tokens("a" * 12 * 2**20) > 8192


def _unfused_words() -> Backend:
    backend = Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def _fused() -> Backend:
    return Backend(models.BPE(vocab={"<unk>": 0}, merges=[], unk_token="<unk>", fuse_unk=True))


def _dropping() -> Backend:
    return Backend(models.BPE(vocab={"a": 0}, merges=[]))


def _stripping() -> Backend:
    backend = _byte_level()
    backend.normalizer = normalizers.Strip()
    return backend


def _squeezing() -> Backend:
    backend = _byte_level()
    backend.normalizer = normalizers.Replace(Regex(" +"), " ")
    return backend


def _removing() -> Backend:
    backend = _byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("x", "removed"), backend.pre_tokenizer])
    return backend


@pytest.mark.parametrize("make", [_unfused_words, _fused, _dropping, _stripping, _squeezing, _removing])
def test_nothing_is_claimed_where_one_token_can_stand_for_any_number_of_characters(make: Callable[[], Backend]) -> None:
    assert token_bound(make()) == TokenBound(None)
    assert token_bound(make()).least_tokens("x" * 10**6) == 0
