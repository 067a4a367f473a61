"""What a step is to compute."""

from dataclasses import dataclass, field

from engine.cache.kv import SlotPair
from engine.capture.row_capture import CapturePlan
from engine.scheduling.sequence import TokenSequence


@dataclass(slots=True, eq=False)
class Chunk:
    """Positions `start … end - 1` of a sequence."""

    sequence: TokenSequence
    start: int
    end: int
    depth: int
    """Decoder layers that its rows run through."""
    samples: bool
    """The logits of its last row give the next token."""
    rows: CapturePlan | None = None
    """The rows to capture; None for a sequence that saves nothing."""
    slots: tuple[SlotPair, ...] = ()
    """Of recurrent layers, per group."""

    @property
    def count(self) -> int:
        return self.end - self.start


@dataclass
class StepPlan:
    """What has been given out for one step."""

    tokens_left: int
    capture_rows_left: int | None
    """Rows times layers."""
    chunks: dict[TokenSequence, Chunk] = field(default_factory=dict)
    ready: list[TokenSequence] = field(default_factory=list)
    """Sequences that turned out to need no computation."""
    starved: list[TokenSequence] = field(default_factory=list)
    """Running, but without a page for their next row."""
    preempted: bool = False

    @property
    def did_something(self) -> bool:
        """Whether another look may find more to do, although nothing has been computed."""
        return bool(self.chunks or self.ready or self.preempted)
