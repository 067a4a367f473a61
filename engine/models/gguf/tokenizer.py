"""The tokenizer that a GGUF file describes, as a `tokenizers` tokenizer.

Two kinds are known: byte-level BPE ("gpt2", merges in the file) and SentencePiece BPE ("llama", pieces with scores, from which the
merges follow). Token types as in llama.cpp (`llama_token_type`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from engine.errors import ModelError
from engine.models.gguf.file import GGUFMetadata
from engine.models.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPACE = "▁"

_SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def build_tokenizer(metadata: GGUFMetadata) -> Tokenizer:
    """Raises `ModelError` for a kind of tokenizer that isn't known: a guess would give other token ids than the model learned."""
    kind = metadata.get("tokenizer.ggml.model", str)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ModelError(f"{metadata.source}: tokenizers of kind {kind!r} are not supported; gpt2 and llama are")
    try:
        tokenizer = builders[kind](metadata)
    except ModelError:
        raise
    except Exception as error:  # the library raises Exception itself
        raise ModelError(f"{metadata.source}: the tokenizer in it is damaged: {error}") from error
    _add_tokens(tokenizer, metadata)
    template = _template(metadata)
    if template is not None:
        tokenizer.post_processor = template
    return tokenizer


def tokenizer_config(metadata: GGUFMetadata) -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    tokens = _tokens(metadata)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(metadata),
        "add_eos_token": _adds_eos(metadata),
        "model_max_length": metadata.get(f"{metadata.architecture}.context_length", int),
    }
    for name, key in _SPECIAL_KEYS.items():
        token_id = _special_id(metadata, key)
        if token_id is not None:
            config[name] = tokens[token_id]
    if "tokenizer.chat_template" in metadata.values:
        config["chat_template"] = metadata.get("tokenizer.chat_template", str)
    return config


def special_token_ids(metadata: GGUFMetadata) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` for config.json, where the file names them.

    A chat model's end-of-turn token ends its text too, so there may be two ids for the end.
    """
    ends = [_special_id(metadata, key) for key in (_SPECIAL_KEYS["eos_token"], "tokenizer.ggml.eot_token_id")]
    eos = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    ids = {
        "bos_token_id": _special_id(metadata, _SPECIAL_KEYS["bos_token"]),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": _special_id(metadata, _SPECIAL_KEYS["pad_token"]),
    }
    return {name: value for name, value in ids.items() if value is not None}


def _byte_level(metadata: GGUFMetadata) -> Tokenizer:
    pre = _pre_tokenizer(metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", list)]
    vocab = {token: token_id for token_id, token in enumerate(_tokens(metadata))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=pre.ignore_merges))
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(metadata: GGUFMetadata) -> PreTokenizer:
    """Raises `ModelError` for a name that isn't known, or where there is none: llama.cpp's guess gives wrong tokens for most models."""
    name = metadata.get("tokenizer.ggml.pre", str)
    if name not in PRE_TOKENIZERS:
        raise ModelError(f"{metadata.source}: the pre-tokenizer {name!r} is not supported; known are {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[name]


def _sentencepiece(metadata: GGUFMetadata) -> Tokenizer:
    tokens = _pieces(metadata)
    unknown = _special_id(metadata, _SPECIAL_KEYS["unk_token"])
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=list(_merges(tokens, _types(metadata), metadata.get("tokenizer.ggml.scores", list))),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    escape = normalizers.Replace(" ", SPACE)
    unescape: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape])
        tokenizer.decoder = decoders.Sequence([*unescape, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = escape
        tokenizer.decoder = decoders.Sequence(unescape)
    return tokenizer


def _pieces(metadata: GGUFMetadata) -> list[str]:
    """The vocabulary as SentencePiece spells it: GGUF files hold runs of spaces as spaces, where they are user-defined pieces."""
    return [SPACE * len(token) if token and not token.strip(" ") else token for token in _tokens(metadata)]


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose joint piece has the best score; as a list: all ways to make each piece, best first.

    User-defined pieces, which SentencePiece never cuts, come before all others.
    """
    vocab = set(tokens)
    mergeable = [token_id for token_id, kind in enumerate(types) if kind in (NORMAL, USER_DEFINED)]
    mergeable.sort(key=lambda token_id: -float("inf") if types[token_id] == USER_DEFINED else -scores[token_id])
    for token_id in mergeable:
        piece = tokens[token_id]
        for cut in range(len(piece) - 1, 0, -1):
            if piece[:cut] in vocab and piece[cut:] in vocab:
                yield piece[:cut], piece[cut:]


def _add_tokens(tokenizer: Tokenizer, metadata: GGUFMetadata) -> None:
    """Control tokens and the unknown one are special, user-defined ones plain; all are found in a text before anything else is."""
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    typed = list(zip(_tokens(metadata), _types(metadata), strict=True))
    control = [token for token, kind in typed if kind in (CONTROL, UNKNOWN)]
    # Runs of spaces are spelled otherwise in the vocabulary; they are merged first instead.
    plain = [token for token, kind in typed if kind == USER_DEFINED and token in vocab]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])


def _template(metadata: GGUFMetadata) -> processors.TemplateProcessing | None:
    """Adds the begin and end tokens that the file wants around a text."""
    tokens = _tokens(metadata)
    around: list[tuple[str, int]] = []
    single = "$A"
    if _adds_bos(metadata):
        bos = metadata.get(_SPECIAL_KEYS["bos_token"], int)
        around.append((tokens[bos], bos))
        single = f"{tokens[bos]} {single}"
    if _adds_eos(metadata):
        eos = metadata.get(_SPECIAL_KEYS["eos_token"], int)
        around.append((tokens[eos], eos))
        single = f"{single} {tokens[eos]}"
    return processors.TemplateProcessing(single=single, special_tokens=around) if around else None


def _adds_bos(metadata: GGUFMetadata) -> bool:
    """What the file says, else llama.cpp's rule for its kind of tokenizer."""
    byte_level = metadata.get("tokenizer.ggml.model", str) == "gpt2"
    return metadata.get("tokenizer.ggml.add_bos_token", bool, _pre_tokenizer(metadata).adds_bos if byte_level else True)


def _adds_eos(metadata: GGUFMetadata) -> bool:
    return metadata.get("tokenizer.ggml.add_eos_token", bool, False)


def _special_id(metadata: GGUFMetadata, key: str) -> int | None:
    token_id = metadata.optional_int(key)
    if token_id is not None and not 0 <= token_id < len(_tokens(metadata)):
        raise ModelError(f"{metadata.source}: {key} is {token_id}, but there are {len(_tokens(metadata))} tokens")
    return token_id


def _tokens(metadata: GGUFMetadata) -> list[str]:
    return metadata.get("tokenizer.ggml.tokens", list)


def _types(metadata: GGUFMetadata) -> list[int]:
    types: list[int] = metadata.get("tokenizer.ggml.token_type", list)
    if len(types) != len(_tokens(metadata)):
        raise ModelError(f"{metadata.source}: tokenizer.ggml.token_type has {len(types)} entries for {len(_tokens(metadata))} tokens")
    return types
