"""The service as a child process, with stand-ins for the service that behave well or badly."""

import os
import textwrap
from pathlib import Path

import pytest

from service.cli.launcher import LaunchError, ServiceProcess

READY = "print('Strata is ready at http://127.0.0.1:1234', flush=True)"


def stand_in(directory: Path, code: str) -> Path:
    """A folder in which `python -m service` runs that code."""
    package = directory / "service"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(textwrap.dedent(code))
    return directory


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_start_returns_once_the_service_says_where_it_is(tmp_path: Path) -> None:
    lines: list[str] = []
    directory = stand_in(tmp_path, f"import sys, time\nprint('loading', *sys.argv[1:])\n{READY}\ntime.sleep(600)")
    with ServiceProcess(["--port", "0"], on_line=lines.append, cwd=directory) as service:
        assert service.url == "http://127.0.0.1:1234"
        assert lines[0] == "loading serve --port 0"


def test_a_service_that_ends_before_it_is_ready_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    directory = stand_in(tmp_path, "import sys\nprint('no such model')\nsys.exit(3)")
    service = ServiceProcess([], cwd=directory)
    with pytest.raises(LaunchError, match=r"ended before it was ready(.|\n)*no such model"):
        service.start()
    assert not is_running(service.pid)


def test_a_service_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    directory = stand_in(tmp_path, "import time\ntime.sleep(600)")
    service = ServiceProcess([], ready_timeout_seconds=0.2, cwd=directory)
    with pytest.raises(LaunchError, match="wasn't ready"):
        service.start()
    assert not is_running(service.pid)


def test_stop_asks_the_service_to_drain_and_wants_it_to_end_with_zero(tmp_path: Path) -> None:
    code = f"""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), sys.exit(0)))
        {READY}
        time.sleep(600)
    """
    with ServiceProcess([], cwd=stand_in(tmp_path, code)) as service:
        service.stop()
        assert service.tail().endswith("drained")
        assert not is_running(service.pid)


def test_a_service_that_ends_with_an_error_is_reported(tmp_path: Path) -> None:
    code = f"""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        {READY}
        time.sleep(600)
    """
    with ServiceProcess([], cwd=stand_in(tmp_path, code)) as service, pytest.raises(LaunchError, match="ended with 7"):
        service.stop()


def test_a_service_that_ignores_sigterm_is_ended_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.cli.launcher.GRACE_SECONDS", 0.2)
    code = f"""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        {READY}
        time.sleep(600)
    """
    with ServiceProcess([], cwd=stand_in(tmp_path, code)) as service:
        with pytest.raises(LaunchError, match="still running"):
            service.stop(timeout_seconds=0.2)
        assert not is_running(service.pid)


def test_an_exception_in_the_caller_never_leaves_the_service_behind(tmp_path: Path) -> None:
    directory = stand_in(tmp_path, f"import time\n{READY}\ntime.sleep(600)")
    service = ServiceProcess([], cwd=directory)
    with pytest.raises(KeyboardInterrupt), service:
        raise KeyboardInterrupt
    assert not is_running(service.pid)
