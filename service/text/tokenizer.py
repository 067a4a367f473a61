"""The model's tokenizer: text to token ids and back, and the text of single tokens."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.errors import InvalidRequest, ModelError
from service.text.token_bound import token_bound
from service.text.token_bytes import BYTE_FALLBACK, BYTE_LEVEL, DecoderKind, decoder_kind, piece_bytes

NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TokenizerMissing(ModelError):
    """The model folder holds no tokenizer: such a model can be served with token ids only."""


class Tokenizer:
    """A model folder's `tokenizer.json` with its `tokenizer_config.json`. Safe to use from several threads.

    `chat_templates` are the Jinja sources of the chat templates by name; a model with one template has it as `default`.
    """

    def __init__(self, backend: Backend, config: dict[str, Any], chat_templates: Mapping[str, str] | None = None) -> None:
        # A tokenizer file may ask for both; neither a cut prompt nor padding may reach the model unasked.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.config = config
        self.chat_templates = dict(chat_templates or {})
        _mark_named_specials(backend, config)
        self.bos_id, self.eos_id, self.pad_id = (self._named_id(name) for name in ("bos_token", "eos_token", "pad_token"))
        self._added = dict(backend.get_added_tokens_decoder())
        self.special_ids = frozenset(token_id for token_id, token in self._added.items() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.decoder_kind: DecoderKind = decoder_kind(backend)
        self._behind = _tokens_behind(backend)
        self._bytes: dict[int, bytes] = {}
        self._bound = token_bound(backend)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Raises `TokenizerMissing` where there is no tokenizer.json, `ModelError` where a file is damaged."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerMissing(f"{folder} has no tokenizer.json, so it takes token ids but no text")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise ModelError(f"{path} can't be read: {error}") from error
        config = _with_special_tokens(folder, _read_json(folder / "tokenizer_config.json"))
        return cls(backend, config, _chat_templates(folder, config))

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of the special tokens that have a role, by the name of that role: what chat templates call them."""
        texts = {name: _token_text(self.config.get(name)) for name in NAMED_SPECIALS}
        return {name: text for name, text in texts.items() if text is not None}

    @property
    def chat_template(self) -> str | None:
        """The template for all messages, where there is one."""
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True, continued: bool = False) -> list[int]:
        """Token ids; with `add_special_tokens` also those that the tokenizer's own template puts around a text.

        A text that is to be `continued` gets none of them behind it. The template is that of tokenizer.json alone: as in transformers 5,
        `add_bos_token` and `add_eos_token` in tokenizer_config.json change nothing where there is a tokenizer.json.
        Special tokens written out in the text are recognised. Raises `InvalidRequest` for text that isn't valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text holds a lone surrogate at character {error.start}, which is not valid Unicode") from error
        # A batch of one: only for batches does the library let go of Python's lock.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids[: len(ids) - self._behind] if add_special_tokens and continued else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Ids that the tokenizer doesn't know (padding of the vocabulary) have no text."""
        (text,) = self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def least_tokens(self, text: str) -> int:
        """How many tokens a text has at least, told by its characters alone; 0 where this tokenizer doesn't allow to tell."""
        return self._bound.least_tokens(text)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token contributes to a decoded text; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The token for a log-probability report: its text, or `bytes:\\xe2\\x82` where it isn't valid UTF-8 by itself."""
        if token_id in self._added:
            return self._added[token_id].content
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an unknown id."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def _compute_bytes(self, token_id: int) -> bytes:
        piece = self.token_piece(token_id)
        if piece is None:
            return b""
        if self.decoder_kind.name in (BYTE_LEVEL, BYTE_FALLBACK):
            return piece_bytes(self.decoder_kind, piece)
        return self.decode([token_id], skip_special_tokens=False).encode("utf-8")

    def _named_id(self, name: str) -> int | None:
        token = _token_text(self.config.get(name))
        token_id: int | None = None if token is None else self._backend.token_to_id(token)
        return token_id


def _tokens_behind(backend: Backend) -> int:
    """How many tokens the template puts behind a text."""
    # One of the special tokens is the text that every tokenizer can encode, whatever its vocabulary.
    probe = next((token.content for token in backend.get_added_tokens_decoder().values() if token.special), "")
    origins: list[int | None] = backend.encode(probe, add_special_tokens=True).sequence_ids
    last = max((at for at, origin in enumerate(origins) if origin is not None), default=len(origins) - 1)
    return len(origins) - 1 - last


def _mark_named_specials(backend: Backend, config: dict[str, Any]) -> None:
    """Tokens that the configuration names as special are special even where tokenizer.json forgot to say so."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    named = (_token_text(config.get(name)) for name in NAMED_SPECIALS)
    forgotten = [name for name in named if name is not None and name not in special and backend.token_to_id(name) is not None]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in forgotten])


def _token_text(value: object) -> str | None:
    """Tokens in tokenizer_config.json are strings, or objects with their `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} can't be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} should hold an object")
    return value


def _with_special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Older models name their special tokens in a file of its own, which transformers reads where the configuration lists no tokens."""
    if "added_tokens_decoder" in config:
        return config
    named = _read_json(folder / "special_tokens_map.json")
    return config | {name: named[name] for name in NAMED_SPECIALS if name in named}


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files of their own go before chat_template.json, and that before tokenizer_config.json (as in transformers)."""
    found = {path.stem: _read_text(path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    file = folder / "chat_template.jinja"
    if file.is_file():
        found["default"] = _read_text(file)
    if found:
        return found
    template = _read_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template if _is_named_template(entry)}
    return {"default": template} if isinstance(template, str) else {}


def _is_named_template(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
