"""Tokenizers built from GGUF files, against transformers' conversion of the same files and against llama.cpp's rules written out."""

import warnings
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from service.text.decoding import IncrementalDecoder
from service.text.tokenizer import Tokenizer

_WORDS = """
The quick brown fox jumps over the lazy dog.|I'll say it's what they'd've done; we're DON'T I'M you'LL|naïve café Ångström façade
supercalifragilisticexpialidocious|camelCase snake_case kebab-case SCREAMING_CASE|"quoted" 'single' `back` «guillemets» “curly” ‘x’
e.g. i.e. etc... and?! so—on – yes|user@example.com https://example.org/a/b?c=d&e=%20f#g|C:\\Windows\\System32|a/b//c///d
""".replace("\n", "|")
_NUMBERS = "0|7|42|2024|3.14159|1,234,567.89|1e-5|0xDEADBEEF|v1.2.3|12:34:56|5% of $100|x1y2z3|²³¹ ½ ¾ Ⅷ ①|٣٤٥ ۱۲ ๑๒ 一二|10 20  30   40"
_CODE = (
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n|for (int i = 0; i < n; ++i) { a[i] += b[i]; }|"
    "SELECT * FROM t WHERE a='b';|"
    '{"key": [1, 2, {"n": null}]}|<div class="x">\n  <p>Hi &amp; bye</p>\n</div>|if x:\n        y = 1\n    else:\n  z|'
    "\\frac{a}{b}^{2}_{i}|"
    "#include <stdio.h>\r\nint main(){}\r\n|a\t\tb\t\t\tc|fn main() -> Result<(), Box<dyn Error>> {}|"
    "x = y if z else w;;|<<<<<<< HEAD\n=======\n"
)
_SCRIPTS = (
    "你好，世界。|今天天气很好！我们去公园吧？|日本語のテキスト、カタカナとひらがな|한국어 문장입니다.|"
    "مرحبا بالعالم، كيف حالك؟|שלום עולם|नमस्ते दुनिया|"
    "สวัสดีชาวโลก|Привет, мир!|Γειά σου Κόσμε|Xin chào thế giới|Türkçe İstanbul ığdır|Ελληνικά καὶ πολυτονικά|"
    "தமிழ் மொழி|ქართული|አማርኛ|ខ្មែរ|𝕳𝖊𝖑𝖑𝖔 𝒲|中a文b混c排1"
)
_MARKS = (
    "e\u0301a\u0308o\u0302\u0323|Z\u0351\u036b\u0343a\u034cl\u0349|ﬀ ﬁ ﬄ|\u200bzero\u200dwidth\u2060|\ufeffbom|"
    "a\u00a0b\u2003c\u3000d|\u202eright-to-left|soft\u00adhyphen"
)
_EMOJI = "😀|😀😃😄|👩‍👩‍👧‍👦 family|👍🏽👍🏿|🇩🇪🇫🇷|❤️ ❤|🏴󠁧󠁢󠁥󠁮󠁧󠁿|emoji😀inside|🤷🏾‍♂️!|✅ done ☑"
_SPACE = [" " * n for n in (1, 2, 3, 4, 7, 8, 16, 17, 31, 32, 33, 65)]
_SPACE += ["\n" * n for n in (1, 2, 3, 5, 31, 32, 40)]
_SPACE += [
    "\t",
    "\t\t\t",
    " \n",
    "\n ",
    " \t \n \r\n ",
    "a   b",
    "a \n\n\n b",
    "\r\r",
    "a  ",
    "  a",
    "a\n",
    "\n\n    x",
    "x \u00a0 y",
    "    \n    \n",
]
_ODD = [
    "",
    ".",
    "<",
    "<0x41>",
    "<0xFF>x",
    "▁",
    "▁▁a",
    "Ġ",
    "Ċ",
    "<|",
    "|>",
    "<|im_start",
    "<unk",
    "\x00",
    "\x01\x7f",
    "\u0378",
    "\U0010fffd",
    "</s>",
    "[INST]",
]
_SPECIAL = [
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "a<|im_end|>b",
    " <|im_start|> <|im_end|> ",
    "<repo_name>x<file_sep>y<jupyter_code>1+1<empty_output>",
    "<|im_start|><|im_start|>",
    "<bos>hello<eos>",
    "<start_of_turn>user\nhi<end_of_turn>\n",
    "<unused5><unused99><mask><pad>",
    "<table><tr><td>1</td></tr></table>",
    "x<h1>y</h1>\n\n<b> z </b>",
]


def _corpus() -> list[str]:
    plain = [line for part in (_WORDS, _NUMBERS, _CODE, _SCRIPTS, _MARKS, _EMOJI) for line in part.split("|") if line]
    placed = [variant for text in plain for variant in (text, f" {text}", f"{text}\n\n  {text}")]
    return list(dict.fromkeys([*placed, *_SPACE, *_ODD, *_SPECIAL, *(f"x{space}1{space}y" for space in _SPACE)]))


CORPUS = _corpus()
# Unassigned and private characters differ between Unicode versions, control characters between definitions of white space.
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"]) | st.sampled_from("  \n\n\t\r1290aeîß中😀'"), max_size=40)
MIXED = st.lists(st.sampled_from(CORPUS) | TEXT, max_size=3).map("".join)


class LlamaCppBytes:
    """Byte-level BPE with the "smollm" pre-tokenizer, as llama.cpp defines it: digits apart, then GPT-2's pattern."""

    DIGIT = regex.compile(r"\p{N}")
    PATTERN = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, file: Path) -> None:
        fields = gguf.GGUFReader(file).fields
        self.tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
        types: list[int] = fields["tokenizer.ggml.token_type"].contents()
        merges: list[str] = fields["tokenizer.ggml.merges"].contents()
        self.control = {token: token_id for token_id, token in enumerate(self.tokens) if types[token_id] == gguf.TokenType.CONTROL}
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}

    @cached_property
    def alphabet(self) -> dict[int, str]:
        kept = {byte for byte in range(256) if chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)}
        moved = iter(range(0x100, 0x200))
        return {byte: chr(byte if byte in kept else next(moved)) for byte in range(256)}

    def encode(self, text: str) -> list[int]:
        control = regex.compile("(" + "|".join(map(regex.escape, self.control)) + ")")
        ids: list[int] = []
        for part in control.split(text):
            ids += [self.control[part]] if part in self.control else [token for word in self._words(part) for token in self._merged(word)]
        return ids

    def _words(self, text: str) -> Iterable[str]:
        for part in regex.split(f"({self.DIGIT.pattern})", text):
            yield from self.PATTERN.findall(part)

    def _merged(self, word: str) -> Iterable[int]:
        pieces = [self.alphabet[byte] for byte in word.encode()]
        while known := [(self.ranks[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in self.ranks]:
            _, i = min(known)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        return (self.ids[piece] for piece in pieces)


def _transformers(file: Path) -> Any:  # noqa: ANN401  # transformers' tokenizers have no common type that says what they do
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2_folder)


@pytest.fixture(scope="module")
def gemma3(gemma3_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(gemma3_folder)


@pytest.fixture(scope="module")
def llama_cpp(smollm2_gguf: Path) -> LlamaCppBytes:
    return LlamaCppBytes(smollm2_gguf)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_gguf: Path) -> Any:  # noqa: ANN401
    return _transformers(smollm2_gguf)


@pytest.fixture(scope="module")
def gemma3_reference(gemma3_gguf: Path) -> Any:  # noqa: ANN401
    return _transformers(gemma3_gguf)


def _known_difference(text: str) -> bool:
    """transformers doesn't cut digits off in "smollm" files, so white space before a digit goes with the digit."""
    return regex.search(r"\s\p{N}", text) is not None


def test_the_corpus_is_varied() -> None:
    assert len(CORPUS) >= 200
    assert sum(not _known_difference(text) for text in CORPUS) >= 200


@pytest.mark.parametrize("text", CORPUS)
def test_smollm2_follows_llama_cpp(text: str, smollm2: Tokenizer, llama_cpp: LlamaCppBytes) -> None:
    assert smollm2.encode(text) == llama_cpp.encode(text)


@pytest.mark.parametrize("text", [text for text in CORPUS if not _known_difference(text)])
def test_smollm2_agrees_with_transformers(text: str, smollm2: Tokenizer, smollm2_reference: Any) -> None:  # noqa: ANN401
    assert smollm2.encode(text) == smollm2_reference.encode(text)


@pytest.mark.parametrize("text", CORPUS)
def test_gemma3_agrees_with_transformers(text: str, gemma3: Tokenizer, gemma3_reference: Any) -> None:  # noqa: ANN401
    assert gemma3.encode(text) == gemma3_reference.encode(text)
    assert gemma3.encode(text, add_special_tokens=False) == gemma3_reference.encode(text, add_special_tokens=False)


@settings(deadline=None, max_examples=300)
@given(text=MIXED)
def test_smollm2_follows_llama_cpp_on_any_text(text: str, smollm2: Tokenizer, llama_cpp: LlamaCppBytes) -> None:
    assert smollm2.encode(text) == llama_cpp.encode(text)


@settings(deadline=None, max_examples=300)
@given(text=MIXED.filter(lambda text: not _known_difference(text)))
def test_smollm2_agrees_with_transformers_on_any_text(text: str, smollm2: Tokenizer, smollm2_reference: Any) -> None:  # noqa: ANN401
    assert smollm2.encode(text) == smollm2_reference.encode(text)


@settings(deadline=None, max_examples=300)
@given(text=MIXED)
def test_gemma3_agrees_with_transformers_on_any_text(text: str, gemma3: Tokenizer, gemma3_reference: Any) -> None:  # noqa: ANN401
    assert gemma3.encode(text) == gemma3_reference.encode(text)


@settings(deadline=None, max_examples=300)
@given(text=MIXED)
def test_what_was_encoded_decodes_to_itself(text: str, smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text
    plain = text.replace("▁", " ")  # SentencePiece writes spaces so
    assert gemma3.decode(gemma3.encode(plain, add_special_tokens=False), skip_special_tokens=False) == plain


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 262143) | st.integers(0, 600), max_size=30), st.booleans())
def test_any_tokens_decode_piece_by_piece_as_they_do_at_once(smollm2: Tokenizer, gemma3: Tokenizer, ids: list[int], skip: bool) -> None:
    for tokenizer in (smollm2, gemma3):
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
        text = "".join(decoder.push([token_id]) for token_id in ids) + decoder.flush()
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_all_control_tokens_are_special_as_in_llama_cpp(smollm2: Tokenizer, llama_cpp: LlamaCppBytes) -> None:
    assert smollm2.special_ids == frozenset(llama_cpp.control.values())
    assert len(smollm2.special_ids) == 17
    assert smollm2.decode(sorted(smollm2.special_ids)) == ""


def test_transformers_reads_the_converted_folder_alike(smollm2_folder: Path, smollm2: Tokenizer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    assert all(tokenizer.encode(text) == smollm2.encode(text) for text in CORPUS)
    assert tokenizer.chat_template == smollm2.chat_template
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (smollm2.bos_id, smollm2.eos_id) == (1, 2)


def test_gemma_begins_texts_with_bos_and_smollm2_with_nothing(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    assert gemma3.encode("hi")[0] == gemma3.bos_id == 2
    assert gemma3.encode("hi")[1:] == gemma3.encode("hi", add_special_tokens=False)
    assert smollm2.encode("hi") == smollm2.encode("hi", add_special_tokens=False)
    assert smollm2.encode("") == []
    assert (smollm2.vocab_size, gemma3.vocab_size) == (49152, 262144)
