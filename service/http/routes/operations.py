"""Health, version and metrics, for operators."""

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool

from service.config.version import strata_version
from service.http.routes.dependencies import RuntimeDependency
from service.schemas.answers import Health, Version

router = APIRouter(tags=["operations"])


NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Starting, draining or dead."}}


@router.get("/health", response_model=Health, responses=NOT_READY)
@router.head("/health", include_in_schema=False)
async def health(runtime: RuntimeDependency) -> JSONResponse:
    """200 once requests are taken, 503 before and after."""
    return JSONResponse({"status": runtime.state}, 200 if runtime.state == "ok" else 503)


@router.get("/ping", response_model=Health, responses=NOT_READY)
@router.head("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
async def ping(runtime: RuntimeDependency) -> JSONResponse:
    """What `/health` answers, under the name that some platforms ask for."""
    return await health(runtime)


@router.get("/health/live", response_model=Health, responses={503: {"model": Health, "description": "Dead."}})
@router.head("/health/live", include_in_schema=False)
async def live(runtime: RuntimeDependency) -> JSONResponse:
    """200 as long as there is no reason to restart the process: also while it starts and drains."""
    return JSONResponse({"status": runtime.state}, 503 if runtime.failed else 200)


@router.get("/version", response_model=Version)
async def version() -> JSONResponse:
    return JSONResponse({"version": strata_version()})


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
async def metrics(runtime: RuntimeDependency) -> Response:
    """The text format of Prometheus."""
    return Response(await run_in_threadpool(runtime.metrics.exposition), media_type=CONTENT_TYPE_LATEST)
