"""What routes are given."""

from typing import Annotated, cast

from fastapi import Depends, Request

from service.runtime import Runtime
from service.services import Services


def get_runtime(request: Request) -> Runtime:
    return cast(Runtime, request.app.state.runtime)


RuntimeDependency = Annotated[Runtime, Depends(get_runtime)]


def services_for_work(runtime: RuntimeDependency) -> Services:
    return runtime.services(for_new_work=True)


def services_for_reading(runtime: RuntimeDependency) -> Services:
    return runtime.services(for_new_work=False)


WorkServices = Annotated[Services, Depends(services_for_work)]
"""For requests that compute: refused while the service drains."""
ReadServices = Annotated[Services, Depends(services_for_reading)]
