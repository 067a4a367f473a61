"""The API reference, `/docs`: Swagger UI, which is part of the package. Its page and files hold no data and need no key."""

from os import PathLike, stat_result

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from service.http.pages import page_headers

PATH = "/docs"
PAGE = "reference.html"
HEADERS = page_headers(style="'self'", script="'self'", connect="'self'")


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
