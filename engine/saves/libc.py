"""Two Linux calls that Python doesn't offer. Each is None where the C library lacks it."""

import ctypes
import os
from collections.abc import Callable

RENAME_NOREPLACE = 1
SYNC_FILE_RANGE_WRITE = 2


def _function(name: str, *argument_types: type) -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        return None
    function.argtypes = argument_types
    function.restype = ctypes.c_int

    def call(*arguments: object) -> int:
        """Raises `OSError` with the call's errno."""
        result = int(function(*arguments))
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    return call


renameat2 = _function("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
sync_file_range = _function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
