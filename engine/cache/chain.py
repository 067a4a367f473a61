"""Names for the blocks of a token sequence: equal names mean equal tokens from the first one on."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b


class HashChain:
    """A digest per full block, each over the one before it and the block's own tokens, seeded by the cache salt.

    Follows a growing token list: digests are computed when they are asked for and kept.
    """

    def __init__(self, token_ids: Sequence[int], block_size: int, salt: str = "") -> None:
        self.block_size = block_size
        self._token_ids = token_ids
        self._links: list[tuple[bytes, bytes]] = []
        self._root = blake2b(salt.encode(), digest_size=16).digest()

    @property
    def num_full_blocks(self) -> int:
        return len(self._token_ids) // self.block_size

    def link(self, index: int) -> tuple[bytes, bytes]:
        """`(digest, tokens)` of full block `index`; tokens as little-endian int64 bytes."""
        assert index < self.num_full_blocks
        while len(self._links) <= index:
            start = len(self._links) * self.block_size
            tokens = array("q", self._token_ids[start : start + self.block_size]).tobytes()
            parent = self._links[-1][0] if self._links else self._root
            self._links.append((blake2b(parent + tokens, digest_size=16).digest(), tokens))
        return self._links[index]
