"""What the engine hands to the writer of a save."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from engine.saves.spec import RowSelection


@dataclass(frozen=True)
class RowChunk:
    """Rows of one save: positions `position … position + count - 1` of the sequence, all of them kept, lying in host pages."""

    position: int
    count: int
    pages: Sequence[Sequence[int]]
    """`[layers][blocks]` page ids; block j of the chunk holds the positions from `(position // page_size + j) * page_size` on."""
    release: Callable[[], None]
    """Called exactly once, from a writer thread, when the rows are no longer needed (written, failed or cancelled)."""


@dataclass(frozen=True)
class SaveEnd:
    """What is known once the last token has been computed."""

    token_ids: Sequence[int]
    """Of the kept positions, in order."""
    positions: Sequence[int] | None
    """The kept positions where not all were kept, else None."""
    num_tokens: int
    """Rows of the sequence that the selection was taken from."""
    num_prompt_tokens: int

    @classmethod
    def of(cls, selection: RowSelection, token_ids: Sequence[int], num_tokens: int, num_prompt_tokens: int) -> Self:
        """What `selection` keeps of the first `num_tokens` rows of a sequence; `token_ids` may be of more."""
        kept = selection.ranges(num_tokens)
        if kept == [(0, num_tokens)]:
            return cls(token_ids[:num_tokens], None, num_tokens, num_prompt_tokens)
        positions = [position for low, high in kept for position in range(low, high)]
        return cls([token_ids[position] for position in positions], positions, num_tokens, num_prompt_tokens)
