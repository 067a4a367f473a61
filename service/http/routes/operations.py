"""Health, version and metrics: for whoever runs the service."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool

from service.config.version import strata_version
from service.http.routes.dependencies import RuntimeDependency
from service.schemas.answers import Health, Version

router = APIRouter(tags=["operations"])


@router.get("/health", response_model=Health, responses={503: {"model": Health, "description": "Starting, draining or dead."}})
async def health(runtime: RuntimeDependency) -> JSONResponse:
    """200 once requests are taken, 503 before and after."""
    return JSONResponse({"status": runtime.state}, 200 if runtime.state == "ok" else 503)


@router.get("/health/live", response_model=Health, responses={503: {"model": Health, "description": "Dead."}})
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
