"""Tokens as text: whole, piece by piece, with stop strings."""

import json
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from engine.errors import InvalidRequest, ModelError
from service.text.decoding import IncrementalDecoder
from service.text.stream import StopStrings, TextStream, first_stop
from service.text.token_bytes import BYTE_FALLBACK, BYTE_LEVEL, OTHER, byte_level_bytes
from service.text.tokenizer import Tokenizer, TokenizerMissing

EURO = "€"


def _byte_level() -> Backend:
    """Every byte, two merged words, and added tokens of several kinds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: token_id for token_id, piece in enumerate([*alphabet, "he", "Ġw", "âĤ"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "w"), ("â", "Ĥ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<é>", special=True), AddedToken("<a b>", special=True)])
    backend.add_tokens([AddedToken("ñ x"), AddedToken("Ġy")])
    return backend


def _sentencepiece(strip: bool) -> Backend:
    """Bytes, some words and added tokens; with `strip` as Llama 2: a space is put before a text and taken off again."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", *bytes_, *"▁abcdehlostw", "▁a", "▁▁", "he", "€"]
    vocab = {piece: token_id for token_id, piece in enumerate(words)}
    merges = [("▁", "a"), ("▁", "▁"), ("h", "e")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    escape = normalizers.Replace(" ", "▁")
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escape]) if strip else escape
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken("<bos>", special=True, normalized=False), AddedToken("<eos>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("\n\n", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocab["€"] + 1)])
    return backend


def _metaspace() -> Backend:
    """A kind whose rules aren't spelled out in the service."""
    pieces = ["<unk>", *"▁abcdehlost€", "▁a", "he"]
    backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("▁", "a"), ("h", "e")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return backend


def _byte_level_among_others() -> Backend:
    """A kind whose rules aren't spelled out either, with tokens that are parts of characters."""
    backend = _byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("ÿ", "y")])
    return backend


TOKENIZERS = {
    "byte level": Tokenizer(_byte_level(), {}),
    "sentencepiece": Tokenizer(_sentencepiece(strip=False), {}),
    "sentencepiece, stripped": Tokenizer(_sentencepiece(strip=True), {}),
    "metaspace": Tokenizer(_metaspace(), {}),
    "byte level among others": Tokenizer(_byte_level_among_others(), {}),
}
BYTES, PIECES, STRIPPED, OTHERS, AMONG_OTHERS = TOKENIZERS.values()
EVERY = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def _ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, unknown ones too; more of those that spell parts of characters, and whole texts in between."""
    some = st.integers(0, tokenizer.vocab_size + 3)
    text = st.text(st.sampled_from(" ahelost€😀é\n"), max_size=6).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    malformed = st.binary(max_size=5).map(lambda raw: _bytes_as_ids(tokenizer, raw))
    return st.lists(st.one_of(some.map(lambda token_id: [token_id]), text, malformed), max_size=12).map(lambda parts: list(chain(*parts)))


def _bytes_as_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    if tokenizer in (BYTES, AMONG_OTHERS):
        spelling = {byte_level_bytes(piece): piece for piece in pre_tokenizers.ByteLevel.alphabet()}
        pieces = [spelling[bytes([byte])] for byte in raw]
    else:
        pieces = [f"<0x{byte:02X}>" for byte in raw]
    ids = [tokenizer._backend.token_to_id(piece) for piece in pieces]
    return [token_id for token_id in ids if token_id is not None]


def _cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in pairwise(borders)]


def _id(tokenizer: Tokenizer, piece: str) -> int:
    token_id: int = tokenizer._backend.token_to_id(piece)
    return token_id


class TestIncrementalDecoder:
    @EVERY
    @settings(deadline=None, max_examples=150)
    @given(data=st.data(), cuts=st.lists(st.integers(0, 100), max_size=8), skip=st.booleans())
    def test_deltas_and_flush_are_the_whole_decoding(self, tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], skip: bool) -> None:
        ids = data.draw(_ids(tokenizer))
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
        text = "".join(decoder.push(part) for part in _cut(ids, cuts))
        pending, end = decoder.pending(), decoder.flush()
        assert text + end == tokenizer.decode(ids, skip_special_tokens=skip)
        assert pending == end
        assert decoder.pending() == ""

    def test_kinds_are_recognised(self) -> None:
        assert [tokenizer.decoder_kind.name for tokenizer in TOKENIZERS.values()] == [
            BYTE_LEVEL,
            BYTE_FALLBACK,
            BYTE_FALLBACK,
            OTHER,
            OTHER,
        ]
        assert STRIPPED.decoder_kind.strip == 1

    def test_a_character_is_given_whole(self) -> None:
        first, last = _id(BYTES, "âĤ"), _id(BYTES, "¬")
        decoder = IncrementalDecoder(BYTES)
        assert [decoder.push([first]), decoder.push([last]), decoder.flush()] == ["", EURO, ""]

    def test_the_end_of_a_text_shows_incomplete_characters(self) -> None:
        decoder = IncrementalDecoder(BYTES)
        assert [decoder.push([_id(BYTES, "âĤ")]), decoder.flush()] == ["", "\ufffd"]

    def test_a_run_of_byte_tokens_is_given_whole_once_it_has_ended(self) -> None:
        euro = _bytes_as_ids(PIECES, EURO.encode())
        decoder = IncrementalDecoder(PIECES)
        assert [decoder.push(euro[:2]), decoder.push(euro[2:]), decoder.pending(), decoder.push([_id(PIECES, "a")])] == ["", "", "€", "€a"]

    def test_special_tokens_do_not_interrupt_a_character(self) -> None:
        decoder = IncrementalDecoder(BYTES)
        assert decoder.push([_id(BYTES, "âĤ"), _id(BYTES, "<bos>"), _id(BYTES, "¬")]) == EURO
        shown = IncrementalDecoder(BYTES, skip_special_tokens=False)
        assert shown.push([_id(BYTES, "âĤ"), _id(BYTES, "<bos>")]) == "\ufffd<bos>"

    @pytest.mark.parametrize("tokenizer", [STRIPPED, OTHERS], ids=["sentencepiece, stripped", "metaspace"])
    def test_a_space_at_the_start_is_kept_where_text_stands_before(self, tokenizer: Tokenizer) -> None:
        prompt, word = tokenizer.encode("he"), _id(tokenizer, "▁a")
        assert IncrementalDecoder(tokenizer).push([word]) == "a"
        assert IncrementalDecoder(tokenizer, context=prompt).push([word]) == " a"
        assert IncrementalDecoder(tokenizer, context=[_id(tokenizer, "<eos>")]).push([word]) == "a"

    @EVERY
    def test_the_cost_of_a_token_does_not_grow_with_the_text(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        decoded: list[int] = []
        original = tokenizer.decode

        def counting(token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            decoded.append(len(token_ids))
            return original(token_ids, skip_special_tokens)

        monkeypatch.setattr(tokenizer, "decode", counting)
        decoder = IncrementalDecoder(tokenizer)
        for token_id in tokenizer.encode("he a " * 200):
            decoder.push([token_id])
        assert max(decoded, default=0) < 40


def _naive_stop(text: str, stop: Sequence[str], behind: int = 0) -> tuple[str, str | None]:
    """Character by character: the text before the first stop string that is complete, the longest of several."""
    for end in range(behind + 1, len(text) + 1):
        done = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


STOPS = st.lists(st.text(st.sampled_from("abhe €"), min_size=1, max_size=4), max_size=4)


class TestStop:
    @EVERY
    @settings(deadline=None, max_examples=150)
    @given(data=st.data(), stop=STOPS, cuts=st.lists(st.integers(0, 100), max_size=6), include=st.booleans())
    def test_text_ends_where_reading_by_characters_would_end_it(
        self, tokenizer: Tokenizer, data: st.DataObject, stop: list[str], cuts: list[int], include: bool
    ) -> None:
        ids = data.draw(_ids(tokenizer))
        before, matched = _naive_stop(tokenizer.decode(ids), stop)
        stream = TextStream(tokenizer, stop, include_stop=include)
        parts = _cut(ids, cuts) or [[]]
        deltas = []
        for number, part in enumerate(parts, start=1):
            deltas.append(stream.push(part, finished=number == len(parts)))
            assert (before + (matched or "") * include).startswith("".join(deltas))
        assert "".join(deltas) == before + (matched or "") * include
        assert stream.matched == matched
        assert stream.length == len("".join(deltas))
        offsets = stream.offsets()
        assert len(offsets) == len(ids)
        assert offsets == sorted(offsets)
        assert all(0 <= offset <= stream.length for offset in offsets)

    @EVERY
    @settings(deadline=None, max_examples=150)
    @given(data=st.data(), stop=STOPS)
    def test_the_engine_stops_at_the_token_that_completes_a_stop(self, tokenizer: Tokenizer, data: st.DataObject, stop: list[str]) -> None:
        ids = data.draw(_ids(tokenizer))
        checker = StopStrings(tokenizer, stop)
        for end, token_id in enumerate(ids, start=1):
            text = tokenizer.decode(ids[:end])
            stopped = checker.completes_stop(token_id)
            assert stopped == any(candidate in text for candidate in stop)
            if stopped:
                assert TextStream(tokenizer, stop).push(ids[:end], finished=True) == _naive_stop(text, stop)[0]
                break

    @EVERY
    @settings(deadline=None, max_examples=150)
    @given(data=st.data(), stop=STOPS, min_tokens=st.integers(1, 8), include=st.booleans())
    def test_stop_strings_within_the_first_tokens_do_not_count(
        self, tokenizer: Tokenizer, data: st.DataObject, stop: list[str], min_tokens: int, include: bool
    ) -> None:
        ids = data.draw(_ids(tokenizer))
        decoder = IncrementalDecoder(tokenizer)
        behind = len(decoder.push(ids[:min_tokens]))
        behind += 0 if "\ufffd" in decoder.pending() else len(decoder.pending())
        checker = StopStrings(tokenizer, stop, min_tokens=min_tokens)
        stopped = [checker.completes_stop(token_id) for token_id in ids]
        assert not any(stopped[:min_tokens])
        count = stopped.index(True) + 1 if any(stopped) else len(ids)
        text = tokenizer.decode(ids[:count])
        before, matched = _naive_stop(text, stop, behind)
        stream = TextStream(tokenizer, stop, include_stop=include, min_tokens=min_tokens)
        sent = "".join(stream.push([token_id]) for token_id in ids[:count]) + stream.push([], finished=True)
        if any(stopped):
            assert stream.matched is not None
            assert stream.matched == matched
        assert sent == before + (stream.matched or "") * include

    def test_a_stop_string_that_begins_in_the_first_tokens_and_ends_behind_them_counts(self) -> None:
        ids = BYTES.encode("abab")
        checker, stream = StopStrings(BYTES, ["ba", "a"], min_tokens=2), TextStream(BYTES, ["ba", "a"], min_tokens=2)
        assert [checker.completes_stop(token_id) for token_id in ids[:3]] == [False, False, True]
        assert (stream.push(ids[:3], finished=True), stream.matched) == ("a", "ba")

    def test_a_stop_string_across_tokens_is_found_and_never_sent(self) -> None:
        ids = BYTES.encode("so he a")
        checker, stream = StopStrings(BYTES, ["he a"]), TextStream(BYTES, ["he a"])
        assert [checker.completes_stop(token_id) for token_id in ids] == [False] * (len(ids) - 1) + [True]
        assert [stream.push([token_id]) for token_id in ids] == ["s", "o", " ", "", "", ""]
        assert (stream.push([], finished=True), stream.matched) == ("", "he a")

    def test_what_only_looked_like_a_stop_string_is_sent_after_all(self) -> None:
        stream = TextStream(BYTES, ["abc"])
        assert [stream.push(BYTES.encode(part)) for part in ("ab", "a", "bd")] == ["", "ab", "abd"]
        assert (stream.push(BYTES.encode("ab")), stream.push([], finished=True), stream.matched) == ("", "ab", None)

    @pytest.mark.parametrize(
        ("text", "stop", "expected"),
        [
            ("abcd", ["abcd", "c"], (2, "c")),
            ("abc", ["c", "bc"], (1, "bc")),
            ("aab", ["b", "aab"], (0, "aab")),
            ("abab", ["ab"], (0, "ab")),
            ("abc", ["x"], None),
            ("", ["x"], None),
        ],
    )
    def test_of_overlapping_stop_strings_the_one_complete_first_counts(self, text: str, stop: list[str], expected: object) -> None:
        assert first_stop(text, stop) == expected

    def test_a_stop_string_spelled_in_byte_tokens_stops_at_its_last_byte(self) -> None:
        ids = PIECES.encode("a" + "é", add_special_tokens=False)
        assert len(ids) == 3
        checker = StopStrings(PIECES, ["é"])
        assert [checker.completes_stop(token_id) for token_id in ids] == [False, False, True]

    def test_special_tokens_are_seen_only_where_they_are_shown(self) -> None:
        ids = [_id(BYTES, "a"), _id(BYTES, "<bos>")]
        hidden = StopStrings(BYTES, ["<bos>"])
        assert [hidden.completes_stop(token_id) for token_id in ids] == [False, False]
        checker = StopStrings(BYTES, ["<bos>"], skip_special_tokens=False)
        assert [checker.completes_stop(token_id) for token_id in ids] == [False, True]

    def test_a_token_that_ends_the_text_by_its_id_is_not_shown(self) -> None:
        ids = BYTES.encode("ab")
        hidden, shown = TextStream(BYTES), TextStream(BYTES, include_stop=True)
        assert hidden.push(ids, finished=True, stop_token_id=ids[-1]) == "a"
        assert shown.push(ids, finished=True, stop_token_id=ids[-1]) == "ab"
        assert hidden.offsets() == [0, 1]

    def test_nothing_comes_after_a_stop(self) -> None:
        stream = TextStream(BYTES, ["b"])
        assert [stream.push(BYTES.encode("ab")), stream.push(BYTES.encode("cd")), stream.push([], finished=True)] == ["a", "", ""]
        assert stream.offsets() == [0, 1, 1, 1]

    def test_an_empty_stop_string_is_refused(self) -> None:
        for make in (StopStrings, TextStream):
            with pytest.raises(InvalidRequest, match="stop must not hold an empty string"):
                make(BYTES, ["a", ""])


class TestOffsets:
    def test_each_token_begins_where_the_text_before_it_ends(self) -> None:
        stream = TextStream(BYTES)
        ids = BYTES.encode("he w€")
        assert stream.push(ids, finished=True) == "he w€"
        assert [(BYTES.token_text(token_id), offset) for token_id, offset in zip(ids, stream.offsets(), strict=True)] == [
            ("he", 0),
            (" w", 2),
            ("bytes:\\xe2\\x82", 4),
            ("bytes:\\xac", 4),
        ]
        assert stream.offsets(2) == [4, 4]

    def test_tokens_after_a_run_of_bytes_begin_behind_it(self) -> None:
        stream = TextStream(PIECES)
        ids = [*_bytes_as_ids(PIECES, "éé".encode()), _id(PIECES, "a")]
        assert stream.push(ids, finished=True) == "ééa"
        assert stream.offsets() == [0, 0, 1, 1, 2]


class TestTokenText:
    def test_tokens_that_are_text_are_shown_as_text(self) -> None:
        assert [BYTES.token_text(_id(BYTES, piece)) for piece in ("he", "Ġw", "<bos>", "<é>", "ñ x")] == ["he", " w", "<bos>", "<é>", "ñ x"]
        assert [STRIPPED.token_text(_id(STRIPPED, piece)) for piece in ("▁a", "<0x41>", "\n\n")] == [" a", "A", "\n\n"]
        assert OTHERS.token_text(_id(OTHERS, "he")) == "he"

    def test_parts_of_characters_are_shown_as_bytes(self) -> None:
        assert BYTES.token_text(_id(BYTES, "âĤ")) == "bytes:\\xe2\\x82"
        assert PIECES.token_text(_id(PIECES, "<0xE2>")) == "bytes:\\xe2"

    @EVERY
    def test_an_unknown_id_has_no_text(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.token_text(tokenizer.vocab_size) == ""
        assert tokenizer.decode([tokenizer.vocab_size]) == ""


class TestEncode:
    def test_the_tokenizers_own_template_is_applied_unless_it_is_not_wanted(self) -> None:
        bos = _id(PIECES, "<bos>")
        assert PIECES.encode("a") == [bos, _id(PIECES, "a")]
        assert PIECES.encode("a", add_special_tokens=False) == [_id(PIECES, "a")]

    @pytest.mark.parametrize("flags", [{"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
    def test_the_configurations_flags_change_nothing(self, flags: dict[str, Any]) -> None:
        named = {"bos_token": "<bos>", "eos_token": {"content": "<a b>"}}
        tokenizer = Tokenizer(_byte_level(), named | flags)
        bos, eos, letter = (_id(BYTES, piece) for piece in ("<bos>", "<a b>", "a"))
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (bos, eos, None)
        assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False) == [letter]
        assert Tokenizer(_sentencepiece(strip=False), named | flags).encode("a") == PIECES.encode("a")

    @pytest.mark.parametrize(
        ("template", "before", "behind"),
        [("$A", 0, 0), ("<bos> $A", 1, 0), ("$A <eos>", 0, 1), ("<bos> $A <eos>", 1, 1), ("<eos> $A <eos> <eos>", 1, 2)],
    )
    @pytest.mark.parametrize("text", ["", "a", "ha<eos>", "<eos><eos>", "e" * 99])
    def test_nothing_is_put_behind_a_text_that_is_to_be_continued(self, template: str, before: int, behind: int, text: str) -> None:
        backend = _sentencepiece(strip=False)
        specials = [(token, backend.token_to_id(token)) for token in ("<bos>", "<eos>")]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
        tokenizer = Tokenizer(backend, {"eos_token": "<eos>"})
        bare = tokenizer.encode(text, add_special_tokens=False)
        closed = tokenizer.encode(text)
        assert (len(closed), closed[before : before + len(bare)]) == (before + len(bare) + behind, bare)
        assert tokenizer.encode(text, continued=True) == closed[: before + len(bare)]
        assert tokenizer.encode(text, add_special_tokens=False, continued=True) == bare

    def test_tokens_behind_a_text_are_known_whatever_the_vocabulary_is(self) -> None:
        backend = Backend(models.WordLevel({"word": 0}, unk_token="<unk>"))
        backend.add_special_tokens(["<eos>"])
        backend.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
        tokenizer = Tokenizer(backend, {})
        assert (tokenizer.encode("word"), tokenizer.encode("word", continued=True)) == ([0, 1], [0])

    def test_special_tokens_in_the_text_are_recognised(self) -> None:
        assert BYTES.encode("<bos>", add_special_tokens=False) == [_id(BYTES, "<bos>")]

    def test_truncation_and_padding_of_the_file_are_not_applied(self) -> None:
        backend = _byte_level()
        backend.enable_truncation(2)
        backend.enable_padding(length=5)
        assert len(Tokenizer(backend, {}).encode("abc")) == 3

    def test_text_that_is_not_unicode_is_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="lone surrogate at character 1"):
            BYTES.encode("a\ud800")

    def test_tokens_that_the_configuration_names_are_special(self) -> None:
        tokenizer = Tokenizer(_byte_level(), {"eos_token": "ñ x", "pad_token": "no such token"})
        assert tokenizer.special_ids == BYTES.special_ids | {_id(BYTES, "ñ x")}
        assert tokenizer.decode([_id(BYTES, "ñ x"), _id(BYTES, "a")]) == "a"
        assert (tokenizer.pad_id, tokenizer.vocab_size) == (None, BYTES.vocab_size)


class TestFolder:
    def _folder(self, folder: Path, config: dict[str, Any] | None = None) -> Path:
        _byte_level().save(str(folder / "tokenizer.json"))
        if config is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    def test_a_folder_without_tokenizer_is_told_apart_from_a_damaged_one(self, tmp_path: Path) -> None:
        with pytest.raises(TokenizerMissing, match=r"has no tokenizer\.json"):
            Tokenizer.from_folder(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ModelError, match=r"tokenizer\.json can't be read") as caught:
            Tokenizer.from_folder(tmp_path)
        assert not isinstance(caught.value, TokenizerMissing)

    @pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
    def test_a_damaged_configuration_is_refused(self, text: str, tmp_path: Path) -> None:
        self._folder(tmp_path)
        (tmp_path / "tokenizer_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)

    def test_a_tokenizer_needs_no_configuration(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.from_folder(self._folder(tmp_path))
        assert tokenizer.encode("he") == BYTES.encode("he")
        assert tokenizer.chat_template is None

    @pytest.mark.parametrize(
        "template",
        ["{{ x }}", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ x }}"}]],
    )
    def test_the_chat_template_of_the_configuration(self, template: object, tmp_path: Path) -> None:
        assert Tokenizer.from_folder(self._folder(tmp_path, {"chat_template": template})).chat_template == "{{ x }}"

    def test_files_of_their_own_go_before_the_configuration(self, tmp_path: Path) -> None:
        self._folder(tmp_path, {"chat_template": "config"})
        (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
        assert Tokenizer.from_folder(tmp_path).chat_template == "json"
        (tmp_path / "chat_template.jinja").write_text("jinja")
        assert Tokenizer.from_folder(tmp_path).chat_template == "jinja"

    def test_templates_without_a_default_are_none(self, tmp_path: Path) -> None:
        self._folder(tmp_path, {"chat_template": [{"name": "rag", "template": "x"}]})
        assert Tokenizer.from_folder(tmp_path).chat_template is None


class TestDecodeStream:
    """Why the library's own stream isn't what `IncrementalDecoder` uses. Where one of these fails, the library has changed: look again."""

    def _streamed(self, tokenizer: Tokenizer, ids: Sequence[int]) -> str:
        stream = decoders.DecodeStream(skip_special_tokens=True)
        return "".join(stream.step(tokenizer._backend, token_id) or "" for token_id in ids)

    @pytest.mark.parametrize("tokenizer", [BYTES, AMONG_OTHERS], ids=["byte level", "byte level among others"])
    def test_it_never_gives_the_end_of_a_text_that_is_half_a_character(self, tokenizer: Tokenizer) -> None:
        ids = [_id(tokenizer, "a"), _id(tokenizer, "âĤ")]
        assert (tokenizer.decode(ids), self._streamed(tokenizer, ids)) == ("a\ufffd", "a")
        assert not {"flush", "finish", "pending"} & set(dir(decoders.DecodeStream))

    def test_it_shows_byte_tokens_whose_run_turns_out_to_be_malformed(self) -> None:
        ids = _bytes_as_ids(PIECES, b"K\xcc")
        assert (PIECES.decode(ids), self._streamed(PIECES, ids)) == ("\ufffd\ufffd", "K")

    def test_it_fails_behind_such_a_run(self) -> None:
        ids = [*_bytes_as_ids(STRIPPED, b"M\xcc"), *(_id(STRIPPED, piece) for piece in "▁s")]
        with pytest.raises(Exception, match="Invalid prefix encountered"):
            self._streamed(STRIPPED, [*ids, *_bytes_as_ids(STRIPPED, b"\n")])
