"""The tiny random model of the HTTP tests, for services that are mistreated."""

from tests.http.conftest import model_folder

__all__ = ["model_folder"]
