"""What a request wants saved, resolved against the model: layers, rows, dtype, metadata of the file."""

import json
import secrets
import time
from dataclasses import dataclass
from typing import cast, get_args

from engine.api import EngineInfo
from engine.layers import LAYER_CONVENTION, LayerId, resolve_layers
from engine.saves.inspect import FORMAT
from engine.saves.spec import SaveDtype, SaveSpec, SaveTarget
from service.config.version import strata_version
from service.registry.records import SaveRecord
from service.schemas.generation import GenerationRequest
from service.schemas.transfer import PREFIX, TransferParams
from service.services import ModelIdentity
from service.text.prompts import PreparedPrompt
from service.wire import rfc3339


@dataclass(frozen=True)
class Extraction:
    """The part that is common to all choices of a request."""

    params: TransferParams
    layers: tuple[LayerId, ...]
    dtype: SaveDtype


def resolve_extraction(
    body: GenerationRequest, by_default: bool, default_layers: tuple[LayerId, ...], info: EngineInfo
) -> Extraction | None:
    """None where nothing is to be saved. Raises `InvalidRequest` for layers that the model doesn't have."""
    params = body.kv_transfer_params
    asked = by_default if params is None else params.extract is not False
    if not asked:
        return None
    params = params or TransferParams.model_validate({})
    layers = default_layers if params.layers is None else resolve_layers(params.layers, info.model.num_layers, f"{PREFIX}.layers")
    return Extraction(params, layers, _dtype(params, info))


def _dtype(params: TransferParams, info: EngineInfo) -> SaveDtype:
    if params.dtype != "auto":
        return params.dtype
    if params.pooling is not None:
        return "float32"
    name = str(info.model.checkpoint_dtype).removeprefix("torch.")
    return cast(SaveDtype, name) if name in get_args(SaveDtype) else "bfloat16"


def check_against_prompt(extraction: Extraction, body: GenerationRequest, prompt: PreparedPrompt) -> None:
    """Raises `InvalidRequest` for positions out of range and for metadata and tensors that are too large."""
    extraction.params.positions.validate(_known_length(extraction.params, body, prompt), f"{PREFIX}.positions")
    extraction.params.check_size(len(prompt.token_ids) + prompt.max_tokens)


def _known_length(params: TransferParams, body: GenerationRequest, prompt: PreparedPrompt) -> int | None:
    """How many positions will be there to choose from; None where that depends on when the text ends."""
    if not params.saves_output or prompt.max_tokens == 0:
        return len(prompt.token_ids)
    runs_to_the_end = body.ignore_eos and not body.stop and not body.stop_token_ids
    if not runs_to_the_end and prompt.max_tokens > 1:
        return None
    return len(prompt.token_ids) + prompt.max_tokens - (0 if params.include_last_token else 1)


def new_save_id() -> str:
    """128 random bits: knowing one id is not guessing another."""
    return secrets.token_hex(16)


def save_spec(extraction: Extraction, save_id: str, target: SaveTarget, metadata: dict[str, str]) -> SaveSpec:
    params = extraction.params
    return SaveSpec(
        save_id=save_id,
        target=target,
        layers=extraction.layers,
        dtype=extraction.dtype,
        include_output_tokens=params.saves_output,
        include_last_token=params.include_last_token,
        rows=params.positions,
        pooling=params.pooling,
        tensors=params.tensors,
        metadata=metadata,
    )


def file_metadata(extraction: Extraction, info: EngineInfo, identity: ModelIdentity, request_id: str) -> dict[str, str]:
    """The file's `__metadata__` as far as the service knows it; the writer adds what depends on the rows."""
    known = {
        "format": FORMAT,
        "model": identity.name,
        "model_revision": identity.revision,
        "num_hidden_layers": str(info.model.num_layers),
        "hidden_size": str(info.model.hidden_size),
        "layers": json.dumps(list(extraction.layers)),
        "layer_convention": LAYER_CONVENTION,
        "final_norm": "true" if "norm" in extraction.layers else "false",
        "compute_dtype": info.dtype,
        "request_id": request_id,
        "created": rfc3339(time.time()),
        "engine": f"strata {strata_version()}",
    }
    return known | {f"user.{name}": text for name, text in extraction.params.metadata.items()}


def new_record(
    extraction: Extraction,
    save_id: str,
    path: str,
    request_id: str,
    model: str,
    choice: int,
    owner: str | None,
) -> SaveRecord:
    return SaveRecord(
        id=save_id,
        hidden_states_path=path,
        request_id=request_id,
        model=model,
        layers=extraction.layers,
        dtype=extraction.dtype,
        created=time.time(),
        ttl_seconds=extraction.params.ttl_seconds,
        owner=owner,
        choice=choice,
    )
