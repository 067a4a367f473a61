"""Keeping writer threads from raising compute threads of their own."""

import ctypes
from pathlib import Path

import torch


def keep_to_one_compute_thread() -> bool:
    """Makes PyTorch's operations on the calling thread, and only those, run on that thread alone. False where it can't be done.

    OpenMP gives every thread that calls it a team of its own, so each writer would add as many threads as there are cores, and
    they would spin beside the model's. `torch.set_num_threads` is no help: it changes what MKL uses in all threads and what later
    threads start with. OpenMP's own setting is the calling thread's.
    """
    torch.get_num_threads()  # PyTorch sets the team's size at its first use on a thread: what was set before would be lost
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        library.omp_set_num_threads(1)
    except (OSError, AttributeError):
        return False
    return torch.get_num_threads() == 1
