"""Failures of background work."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Ended(Protocol):
    """A task or a future that has ended."""

    def cancelled(self) -> bool: ...
    def exception(self) -> BaseException | None: ...


def logs_failure(log: logging.Logger, message: str, fields: Mapping[str, Any] | None = None) -> Callable[[Ended], None]:
    """A callback for tasks and futures: writes the message, with these fields, where they ended with an exception."""

    def ended(done: Ended) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error(message, exc_info=error, extra={"fields": fields or {}})

    return ended
