"""The ASGI application."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from engine.errors import ConfigError
from service.api import completions, models, operations, saves
from service.errors import install_handlers
from service.middleware import BodyLimit, RequestId, UnexpectedErrors
from service.runtime import Runtime
from service.settings import Settings
from service.version import strata_version

log = logging.getLogger(__name__)

DESCRIPTION = "Runs a causal language model and writes the hidden states of chosen layers to safetensors files."


def create_app(settings: Settings, runtime: Runtime | None = None) -> FastAPI:
    """An application that starts its runtime in the background when it is started, so that `/health` answers while the model loads.

    `app.state.start` is the task of the start; it fails with a `ConfigError` where the settings can't work.
    """
    runtime = runtime or Runtime(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.start = asyncio.get_running_loop().create_task(runtime.start())
        app.state.start.add_done_callback(_log_failure)
        yield
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
    )
    app.state.runtime = runtime
    for module in (completions, saves, models, operations):
        app.include_router(module.router)
    install_handlers(app)
    for middleware in (BodyLimit, UnexpectedErrors, RequestId):  # the last one is the outermost
        app.add_middleware(middleware)
    return app


def _log_failure(start: "asyncio.Task[None]") -> None:
    if start.cancelled():
        return
    error = start.exception()
    if isinstance(error, ConfigError):
        log.error("%s", error)
    elif error is not None:
        log.error("the service could not start", exc_info=error)
