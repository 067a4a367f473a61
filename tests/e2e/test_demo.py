"""`strata demo` as a person runs it, with the embedded model."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def start_demo(directory: Path) -> subprocess.Popen[str]:
    # Ctrl-C is ignored in what a shell starts in the background, and children inherit that.
    return subprocess.Popen(
        [sys.executable, "-m", "service", "demo", "--max-tokens", "4", "--threads", "1", "--save-root", str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def services_saving_to(directory: Path) -> list[int]:
    """Running services that were told to save there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and os.fsencode(directory) in words:
            found.append(int(entry.parent.name))
    return found


def test_the_demo_shows_a_file_ends_with_zero_and_leaves_nothing_running(tmp_path: Path) -> None:
    with start_demo(tmp_path) as demo:
        output, _ = demo.communicate()
    assert demo.returncode == 0, output
    assert load_file(tmp_path / "demo.safetensors")["hidden_states"].shape[1:] == (4, 576)
    for part in ("Strata is ready at", "hidden_states", "tokens per second", "layer 30", 'strata_saves_total{outcome="completed"}'):
        assert part in output
    assert services_saving_to(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_takes_the_service_with_it(number: signal.Signals, tmp_path: Path) -> None:
    with start_demo(tmp_path) as demo:
        assert demo.stdout is not None
        started = next(line for line in demo.stdout if line.startswith("  | "))
        demo.send_signal(number)
        output = demo.stdout.read()
    assert demo.returncode == 1, started + output
    assert "the service has been stopped" in output
    assert services_saving_to(tmp_path) == []


def test_a_service_that_can_not_start_is_shown_with_its_own_words(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "service", "demo", "--model", str(tmp_path / "nothing"), "--save-root", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ended before it was ready" in done.stderr
    assert "neither a folder" in done.stderr
