"""`strata inspect` and `strata verify`: what files hold, and whether they keep their promises."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from engine.config import Checksum
from engine.saves.digest import new_digest
from engine.saves.file import COPY_BYTES
from engine.saves.inspect import FileReport, inspect_file
from service.config.units import format_size
from service.registry.database import DATABASE
from service.registry.read_only import RecordedFile, RecordedFiles


def inspect_files(paths: Sequence[Path]) -> int:
    """Prints tensors and metadata of every file; 1 if one can't be read or has problems."""
    return _for_each(paths, _print_contents)


def verify_files(paths: Sequence[Path], state_directory: Path, *, registry_expected: bool) -> int:
    """Prints one line per file; 1 if one of them can't be read or has problems.

    Files whose saves are in the registry of the state directory are compared with their records too, size and checksum. Raises
    `ConfigError` where that registry can't be read, or is missing though it is expected.
    """
    known = registry_expected or (state_directory / DATABASE).exists()
    with RecordedFiles(state_directory) if known else nullcontext() as records:
        return _for_each(paths, lambda report: _print_verdict(report, records))


def _for_each(paths: Sequence[Path], show: Callable[[FileReport], bool]) -> int:
    """`show` says whether the file is sound."""
    status = 0
    for path in paths:
        try:
            sound = show(inspect_file(path))
        except OSError as error:
            print(f"{path}: {error.strerror or error}")
            sound = False
        status = status if sound else 1
    return status


def _print_verdict(report: FileReport, records: RecordedFiles | None) -> bool:
    record = _record_of(report, records)
    problems = [*report.problems, *_differences(report, record)]
    verified = record is not None and record.checksum is not None
    verdict = "; ".join(problems) if problems else "ok, as recorded" if verified else "ok"
    print(f"{report.path}: {verdict}")
    return not problems


def _record_of(report: FileReport, records: RecordedFiles | None) -> RecordedFile | None:
    save_id = None if report.header is None else report.header.metadata.get("save_id")
    return None if records is None or save_id is None else records.find(save_id)


def _differences(report: FileReport, record: RecordedFile | None) -> list[str]:
    """Between a file and its record. Raises `OSError`."""
    if record is None:
        return []
    if record.bytes is not None and record.bytes != report.size:
        return [f"the file has {report.size} bytes, its record says {record.bytes}"]
    if record.checksum is None:
        return []
    algorithm, _, recorded = record.checksum.partition(":")
    return [] if _digest(Path(report.path), algorithm) == recorded else [f"its {algorithm} is not the one in its record"]


def _digest(path: Path, algorithm: str) -> str:
    digest: Any = new_digest(cast(Checksum, algorithm))
    with path.open("rb") as file:
        while piece := file.read(COPY_BYTES):
            digest.update(piece)
    return str(digest.hexdigest())


def _print_contents(report: FileReport) -> bool:
    print(f"{report.path} ({format_size(report.size)})")
    if report.header is not None:
        for tensor in report.header.tensors:
            print(f"  {tensor.entry.name:<24} {tensor.entry.dtype:<8} {list(tensor.entry.shape)}")
        for name, value in sorted(report.header.metadata.items()):
            print(f"  {name:<24} {value}")
    for problem in report.problems:
        print(f"  problem: {problem}")
    return report.ok
