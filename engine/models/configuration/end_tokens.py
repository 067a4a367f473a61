"""Which tokens end a text: those of the configurations and the tokenizer's own."""

from pathlib import Path

from engine.models.checkpoints.hf_config import JsonObject, read_json_object

NO_TOKEN = -1
"""What configurations write where there is no such token."""


def eos_token_ids(folder: Path, config: JsonObject) -> tuple[int, ...]:
    """From `generation_config.json` where it names any, else from `config.json`; and the tokenizer's own end of text beside them.

    Configurations of instruct models often keep the base model's token, while the turns of a chat end with the tokenizer's.
    """
    configured = _token_ids(config, "eos_token_id")
    path = folder / "generation_config.json"
    if path.is_file():
        configured = _token_ids(JsonObject(str(path), read_json_object(path)), "eos_token_id") or configured
    own = tokenizer_eos_id(folder)
    return configured if own is None else tuple(dict.fromkeys((*configured, own)))


def tokenizer_eos_id(folder: Path) -> int | None:
    """The id of `eos_token` in `tokenizer_config.json`; None where the folder doesn't tell."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    config = read_json_object(path)
    token = config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    added = config.get("added_tokens_decoder")
    known = added.items() if isinstance(added, dict) else ()
    for token_id, description in known:
        if isinstance(description, dict) and description.get("content") == token and token_id.isdigit():
            return int(token_id)
    return _id_in_tokenizer(folder / "tokenizer.json", token)


def _id_in_tokenizer(path: Path, token: str) -> int | None:
    if not path.is_file():
        return None
    values = read_json_object(path)
    added, model = values.get("added_tokens"), values.get("model")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("content") == token and isinstance(entry.get("id"), int):
            return int(entry["id"])
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found = vocab.get(token) if isinstance(vocab, dict) else None
    return found if isinstance(found, int) else None


def _token_ids(config: JsonObject, name: str) -> tuple[int, ...]:
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    found: dict[int, None] = {}
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < NO_TOKEN:
            raise config.error(f"{name} must be a token id or a list of them, not {value!r}")
        if token_id != NO_TOKEN:
            found[token_id] = None
    return tuple(found)
