"""The API reference, `/docs`: Swagger UI, which is part of the package. Its page and files hold no data and need no key."""

from os import PathLike, stat_result

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PATH = "/docs"
PAGE = "reference.html"
HEADERS = {
    # Scripts and requests are this service's own; Swagger UI puts styles into its elements.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Reference(StaticFiles):
    """The files below `/docs/`, and the page itself."""

    def __init__(self) -> None:
        super().__init__(packages=[("service.http", "reference_files")])

    def file_response(self, full_path: "str | PathLike[str]", stat_result: stat_result, scope: Scope, status_code: int = 200) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def add_reference(app: Starlette) -> None:
    files = Reference()

    async def page(request: Request) -> Response:
        return await files.get_response(PAGE, request.scope)

    app.add_route(PATH, page)
    app.mount(PATH, files)


def is_reference(path: str) -> bool:
    return path == PATH or path.startswith(PATH + "/")
