"""Why a step could not be computed."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.scheduling.plan import Chunk

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepFault:
    """What an attempt at a step raised. The exception itself isn't kept: its traceback would keep the tensors of the attempt."""

    name: str
    """Of the exception's class."""
    out_of_memory: bool

    def __str__(self) -> str:
        if self.out_of_memory:
            return f"there was not enough memory to compute this request: {self.name}"
        return f"the step that computed this request failed: {self.name}"


def fault_of(error: Exception) -> StepFault:
    return StepFault(type(error).__name__, is_out_of_memory(error))


def is_out_of_memory(error: Exception) -> bool:
    """Devices have an exception of their own; the host's allocator and cuBLAS raise a RuntimeError that only its text tells apart."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text)


def note_step_fault(error: Exception, chunks: Sequence[Chunk]) -> StepFault:
    """The first attempt at a step has failed; called where the error is handled. It should be gone when the step is tried again."""
    _log.error("a step over %d requests failed", len(chunks), exc_info=error, extra={"fields": _fields_of(chunks)})
    return fault_of(error)


def log_request_fault(error: Exception, chunk: Chunk) -> None:
    """A request has failed alone."""
    _log.error("a request alone: %s: %s", type(error).__name__, error, extra={"fields": _fields_of([chunk])})


def _fields_of(chunks: Sequence[Chunk]) -> dict[str, object]:
    """What a log line about these chunks says of their requests."""
    fields = [chunk.sequence.request.log_fields for chunk in chunks]
    return dict(fields[0]) if len(fields) == 1 else {"request_ids": [each["request_id"] for each in fields]}
