"""The ASGI application."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from engine.errors import ConfigError
from service.config.settings import Settings
from service.config.version import strata_version
from service.http.access_log import AccessLog
from service.http.auth import ApiKeys
from service.http.body_bounds import body_bytes
from service.http.errors import install_handlers
from service.http.hosts import HostCheck
from service.http.limits import DEFAULT_LIMITS, HttpLimits
from service.http.middleware import Authentication, BodyLimit, HeadLimit, RequestId, RequestLimit, ResponseMetrics, UnexpectedErrors
from service.http.reference import add_reference
from service.http.routes import chat, completions, files, models, operations, pages, saves, tokens
from service.observe.tracing import TraceIds, telemetry_off
from service.runtime import Runtime
from service.schemas.answers import COMMON_ERRORS

log = logging.getLogger(__name__)

BEARER = HTTPBearer(auto_error=False, description="An API key, where the service runs with --api-keys-file.")
CORS_METHODS = ("GET", "HEAD", "POST", "DELETE")
CORS_EXPOSED = ("Content-Range", "ETag", "Retry-After", "X-Request-Id", "X-Should-Retry")

DESCRIPTION = "Runs a causal language model and writes the hidden states of chosen layers to safetensors files."


def create_app(settings: Settings, runtime: Runtime | None = None, limits: HttpLimits = DEFAULT_LIMITS) -> FastAPI:
    """An application that starts its runtime in the background when it is started, so that `/health` answers while the model loads.

    `app.state.start` is the task of the start; it fails with a `ConfigError` where the settings can't work. A keys file that can't be
    used raises one here. `app.state.keys` are the `ApiKeys`, None where no key is needed.
    """
    keys = None if settings.api_keys_file is None else ApiKeys(settings.api_keys_file)
    runtime = runtime or Runtime(settings)
    if keys is not None:
        runtime.shares.several = lambda: keys.num_owners > 1

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.start = asyncio.get_running_loop().create_task(runtime.start())
        app.state.start.add_done_callback(_report_failed_start)
        yield
        if not app.state.start.done():
            runtime.interrupt_start()
        await asyncio.wait([app.state.start])
        await runtime.stop()

    app = FastAPI(
        title="Strata",
        version=strata_version(),
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=_middleware(settings, keys, limits, runtime),
        telemetry=telemetry_off() if runtime.tracing is None else runtime.tracing.telemetry,
    )
    app.state.runtime = runtime
    app.state.keys = keys
    for module in (completions, chat, tokens, saves, files, models, pages):
        app.include_router(module.router, dependencies=[Depends(BEARER)], responses=COMMON_ERRORS)
    app.include_router(operations.router)
    add_reference(app)
    install_handlers(app)
    return app


def _middleware(settings: Settings, keys: ApiKeys | None, limits: HttpLimits, runtime: Runtime) -> list[Middleware]:
    """The outermost first. Browsers must be able to read refusals too, so what allows that stands before what refuses."""
    shares = runtime.shares
    all_bodies = shares.share("bytes of the bodies of all requests", limits.all_bodies_bytes, "too_many_requests")
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origin,
        allow_methods=CORS_METHODS,
        allow_headers=("*",),
        expose_headers=CORS_EXPOSED,
    )
    return [
        Middleware(ResponseMetrics, metrics=runtime.metrics),
        Middleware(RequestId),
        *([] if runtime.tracing is None else [Middleware(TraceIds)]),
        Middleware(AccessLog),
        Middleware(HostCheck, bound=settings.host, allowed=settings.allowed_host),
        *([cors] if settings.cors_origin else []),
        Middleware(UnexpectedErrors),
        Middleware(HeadLimit, limits=limits),
        Middleware(Authentication, keys=keys),
        Middleware(RequestLimit, answers=shares.share("requests being answered", limits.requests, "too_many_requests")),
        Middleware(BodyLimit, limits=limits, most=lambda: body_bytes(runtime.context_length, limits.body_bytes), all_bodies=all_bodies),
    ]


def _report_failed_start(start: "asyncio.Task[None]") -> None:
    if start.cancelled():
        return
    error = start.exception()
    if isinstance(error, ConfigError):
        log.error("%s", error)
    elif error is not None:
        log.error("the service could not start", exc_info=error)
