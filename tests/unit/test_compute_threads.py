"""Compute threads and the allocator, in processes of their own: both are settings of a whole process."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import engine.device.threads as compute_threads

COUNT_TEAM = """
import os, torch
from engine.device.threads import release_compute_threads
torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)
before = len(os.listdir("/proc/self/task"))
assert release_compute_threads()
print(before - len(os.listdir("/proc/self/task")), torch.ones(1 << 20).add_(1).sum().item())
"""

COUNT_FAULTS = """
import resource, threading, torch
from engine.device.allocator import keep_freed_memory
assert keep_freed_memory()

def step():
    for _ in range(3):
        torch.ones(6 << 20), torch.ones(3 << 20)

def work():
    for _ in range(5):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

torch.set_num_threads(1)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def output_of(script: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout.split()


def test_the_team_of_the_loading_thread_ends_and_comes_back_when_needed() -> None:
    if not list((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        pytest.skip("this torch comes without GNU's OpenMP, the only one that counts threads of idle teams")
    ended, total = output_of(COUNT_TEAM)
    assert int(ended) == 1
    assert float(total) == 2 << 20


@pytest.mark.parametrize("name", ["keep_to_one_compute_thread", "release_compute_threads"])
def test_another_openmp_is_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def missing() -> None:
        raise OSError("no such library")

    before = torch.get_num_threads()
    monkeypatch.setattr(compute_threads, "_openmp", missing)
    assert getattr(compute_threads, name)() is False
    assert torch.get_num_threads() == before


def test_freed_memory_is_used_again() -> None:
    pages_of_a_step = 3 * 9 * (1 << 20) * 4 // 4096
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("mallopt is glibc's; without it the system's own way remains")
    [kept] = output_of(COUNT_FAULTS)
    assert int(kept) < pages_of_a_step / 20
