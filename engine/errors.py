"""Errors that a caller of the engine can cause or must handle. `assert` is for our own invariants."""

from typing import Literal

SaveErrorCode = Literal[
    "cancelled",  # the request was aborted
    "conflict",  # the target file appeared while the save was running
    "engine_error",  # the engine failed before all rows were computed
    "interrupted",  # the process ended before the save was published
    "io_error",
    "no_space",
    "non_finite",
    "out_of_range",  # a value that the asked dtype can't hold
]


class EngineError(Exception):
    """Base of all errors raised by the engine."""


class InvalidRequest(EngineError):
    """A value that the caller must change. `param` names the field as the client wrote it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFull(EngineError):
    """There is no room for the request beside those that the engine has: it may be asked for again later."""


class EngineUnavailable(EngineError):
    """The engine is draining, stopped or dead; nothing was computed."""


class StepFailed(EngineError):
    """A step that this request was part of raised an exception."""


class RequestAborted(EngineError):
    """The request was aborted before it ended."""


class ConfigError(EngineError):
    """A setting that can't work; raised at start, its message is one line for the operator."""


class ModelError(ConfigError):
    """A model folder that is missing, damaged or of an architecture that isn't supported."""


class SaveError(EngineError):
    """A save that failed; nothing of it remains on disk."""

    def __init__(self, code: SaveErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: SaveErrorCode = code
