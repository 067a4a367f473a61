"""`GET /v1/models`."""

from typing import Any

from fastapi import APIRouter

from engine.layers import LAYER_CONVENTION
from service.http.routes.dependencies import ReadServices
from service.schemas.answers import ERRORS, ModelList

router = APIRouter(tags=["models"])


@router.get("/v1/models", response_model=ModelList, responses={503: ERRORS[503]})
async def list_models(services: ReadServices) -> dict[str, Any]:
    """The one model that is served, with what a client needs to know to ask for layers."""
    info = services.info
    card = {
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
    return {"data": [card]}
