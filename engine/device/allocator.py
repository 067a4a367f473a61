"""How the C library's allocator treats the activations of a step, which come and go in the same sizes step after step."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of glibc's mallopt(3)."""
_LARGEST_BYTES, _LARGEST_BYTES_ONCE, _KEPT_BYTES = 2**30, 2**25, 2**31 - 1
"""Blocks that may lie in the heap, where older versions refuse more than 32 MiB; memory at the heap's end that is kept."""


def keep_freed_memory() -> bool:
    """Memory that was freed is used again instead of going back to the kernel, which would clear each page anew for the next step.

    Of the whole process. False where the allocator is not glibc's. One arena, since others give their parts back all the same.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    one_arena = mallopt(_M_ARENA_MAX, 1)
    in_heap = mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES) or mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES_ONCE)
    kept = mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return bool(one_arena and in_heap and kept)
