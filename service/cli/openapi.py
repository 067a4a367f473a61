"""openapi.yaml, generated from the routes and their models."""

from typing import Any

import yaml

from service.config.settings import Settings
from service.http.app import create_app


def openapi_yaml() -> str:
    """The document at the repository's root. It doesn't depend on settings or on the environment."""
    document = create_app(Settings.model_construct()).openapi()
    _without_validation_errors(document)
    # The version of the checkout isn't part of the interface.
    document["info"]["version"] = "1"
    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120))


def _without_validation_errors(document: dict[str, Any]) -> None:
    """FastAPI documents a 422 that is answered with 400 here."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
