"""Names for the blocks of a token sequence: equal names mean equal tokens from the first one on."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

Link = tuple[bytes, bytes]
"""`(digest, tokens)` of a block: the digest of all tokens up to its end, and its own tokens as int64 bytes."""


class HashChain:
    """A digest per full block, each over the one before it and the block's own tokens, seeded by the cache salt.

    Follows a growing token list: digests are computed when they are asked for and kept.
    """

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: str = "") -> None:
        self.block_size = block_size
        self._token_ids = token_ids
        self._links: list[Link] = []
        self._digest = blake2b(salt.encode(), digest_size=16).digest()
        """Of the last link, or of the salt."""

    @property
    def num_full_blocks(self) -> int:
        return len(self._token_ids) // self.block_size

    def link(self, index: int) -> Link:
        """The name of full block `index`."""
        if index >= len(self._links):
            self._grow(index + 1)
        return self._links[index]

    def links(self, first: int, end: int) -> list[Link]:
        """The names of full blocks `first … end - 1`."""
        if end > len(self._links):
            self._grow(end)
        return self._links[first:end]

    def shared_end(self, other: "HashChain") -> int:
        """Tokens in the full blocks that both begin with. Compares tokens, which is much faster than to name them."""
        mine, theirs, size = self._token_ids, other._token_ids, self.block_size
        end = min(self.num_full_blocks, other.num_full_blocks) * size
        if not end or self.link(0) != other.link(0):  # the salt is part of the first name
            return 0
        shared = size
        for step in (64 * size, size):
            while shared + step <= end and mine[shared : shared + step] == theirs[shared : shared + step]:
                shared += step
        return shared

    def _grow(self, end: int) -> None:
        assert end <= self.num_full_blocks
        start, size = len(self._links) * self.block_size, self.block_size * array("q").itemsize
        data = array("q", self._token_ids[start : end * self.block_size]).tobytes()
        digest = self._digest
        for at in range(0, len(data), size):
            tokens = data[at : at + size]
            digest = blake2b(tokens, digest_size=16, key=digest).digest()
            self._links.append((digest, tokens))
        self._digest = digest
