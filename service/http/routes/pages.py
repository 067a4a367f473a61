"""The front page, `GET /`: what this service is and how it is. It loads nothing from anywhere else."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from service.config.version import strata_version
from service.http.pages import front_page, page_headers
from service.http.routes.dependencies import RuntimeDependency
from service.runtime import Runtime
from service.schemas.answers import Front
from service.services import Services

router = APIRouter(tags=["operations"])

LINKS = {"docs": "/docs", "openapi": "/openapi.json", "models": "/v1/models", "saves": "/saves", "health": "/health", "metrics": "/metrics"}
HEADERS = page_headers(style="'unsafe-inline'") | {"Vary": "Accept"}


@router.get("/", response_model=Front, responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}})
async def front(request: Request, runtime: RuntimeDependency) -> Response:
    """What is served, and whether it is well: a page for browsers, JSON for others."""
    known = Front(version=strata_version(), status=runtime.state, model=_model(runtime), links=LINKS)
    if _wants_html(request):
        return HTMLResponse(front_page(known, str(request.base_url)), headers=HEADERS)
    return Response(known.model_dump_json(), media_type="application/json", headers=HEADERS)


def _wants_html(request: Request) -> bool:
    """Browsers name HTML; programs that take anything get JSON."""
    return "text/html" in request.headers.get("accept", "")


def _model(runtime: Runtime) -> dict[str, Any] | None:
    services = runtime.ready
    return None if services is None else _card(services)


def _card(services: Services) -> dict[str, Any]:
    info = services.info
    return {
        "name": services.identity.name,
        "revision": services.identity.revision,
        "architecture": info.model.architecture,
        "layers": info.model.num_layers,
        "width": info.model.hidden_size,
        "context": info.max_model_len,
        "default layers": list(services.default_layers),
        "computed in": f"{info.dtype} on {info.device}",
    }
