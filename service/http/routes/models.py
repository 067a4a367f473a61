"""The model that is served, and how much it has to do: `GET /v1/models`, `/v1/models/{id}`, `/load`."""

from typing import Any

from fastapi import APIRouter

from engine.layers import LAYER_CONVENTION
from service.http.routes.dependencies import ReadServices
from service.requests.admission import check_model
from service.schemas.answers import ERRORS, WRONG_MODEL, Load, ModelCard, ModelList
from service.services import Services

router = APIRouter(tags=["models"])


@router.get("/v1/models", response_model=ModelList, responses={503: ERRORS[503]})
async def list_models(services: ReadServices) -> dict[str, Any]:
    """The one model that is served, with what a client needs to know to ask for layers."""
    return {"data": [_card(services)]}


@router.get("/v1/models/{model_id:path}", response_model=ModelCard, responses=WRONG_MODEL | {503: ERRORS[503]})
async def get_model(model_id: str, services: ReadServices) -> dict[str, Any]:
    """The model of this id, which may hold slashes."""
    check_model(services, model_id)
    return _card(services)


@router.get("/load", response_model=Load, responses={503: ERRORS[503]})
async def load(services: ReadServices) -> dict[str, int]:
    """How many completions the engine is computing or has waiting, each choice for itself."""
    stats = services.engine.stats()
    return {"server_load": stats.running + stats.waiting}


def _card(services: Services) -> dict[str, Any]:
    info = services.info
    return {
        "id": services.identity.name,
        "created": int(services.started),
        "revision": services.identity.revision,
        "max_model_len": info.max_model_len,
        "num_hidden_layers": info.model.num_layers,
        "hidden_size": info.model.hidden_size,
        "vocab_size": info.model.vocab_size,
        "default_layers": list(services.default_layers),
        "layer_convention": LAYER_CONVENTION,
        "dtype": info.dtype,
    }
