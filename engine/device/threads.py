"""Compute threads: only the engine thread has any.

OpenMP gives every thread that calls it a team of its own, as large as PyTorch is told. `torch.set_num_threads` is no help: it changes what
MKL uses in all threads and what later threads start with. OpenMP's own calls are about the calling thread.
"""

import ctypes
from pathlib import Path

import torch

_PAUSE_SOFT = 1
"""GNU's OpenMP ends the calling thread's team, whatever the kind of pause; LLVM's, which doesn't count threads that way, keeps them."""


def keep_to_one_compute_thread() -> bool:
    """Makes PyTorch's operations on the calling thread, and only those, run on that thread alone. False where it can't be done.

    For writer threads: each would add as many threads as there are cores, and they would spin beside the model's.
    """
    torch.get_num_threads()  # PyTorch sets the team's size at its first use on a thread: what was set before would be lost
    try:
        _openmp().omp_set_num_threads(1)
    except (OSError, AttributeError):
        return False
    return torch.get_num_threads() == 1


def release_compute_threads() -> bool:
    """Ends the calling thread's team, which is made anew should it be needed. False where it can't be done.

    For the thread that loads the model. As long as its team is there, if idle, OpenMP counts more threads than cores, and then the engine's
    team sleeps after every operation instead of waiting for the next one: 55 microseconds each, of which a step has hundreds.
    """
    try:
        return bool(_openmp().omp_pause_resource_all(_PAUSE_SOFT) == 0)
    except (OSError, AttributeError):
        return False


def _openmp() -> ctypes.CDLL:
    """PyTorch's own; another copy in the process would have threads of its own."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
