"""`strata inspect` and `strata verify`: what files hold, and whether they keep their promises."""

from collections.abc import Callable, Sequence
from pathlib import Path

from engine.saves.inspect import FileReport, inspect_file
from service.sizes import format_size


def inspect_files(paths: Sequence[Path]) -> int:
    """Prints tensors and metadata of every file; 1 if one can't be read or has problems."""
    return _for_each(paths, _print_contents)


def verify_files(paths: Sequence[Path]) -> int:
    """Prints one line per file; 1 if one of them can't be read or has problems."""
    return _for_each(paths, lambda report: print(f"{report.path}: {'ok' if report.ok else '; '.join(report.problems)}"))


def _for_each(paths: Sequence[Path], show: Callable[[FileReport], None]) -> int:
    status = 0
    for path in paths:
        try:
            report = inspect_file(path)
        except OSError as error:
            print(f"{path}: {error.strerror or error}")
            status = 1
            continue
        show(report)
        status = status if report.ok else 1
    return status


def _print_contents(report: FileReport) -> None:
    print(f"{report.path} ({format_size(report.size)})")
    if report.header is not None:
        for tensor in report.header.tensors:
            print(f"  {tensor.entry.name:<24} {tensor.entry.dtype:<8} {list(tensor.entry.shape)}")
        for name, value in sorted(report.header.metadata.items()):
            print(f"  {name:<24} {value}")
    for problem in report.problems:
        print(f"  problem: {problem}")
