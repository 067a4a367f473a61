"""Prints the parity table: `python -m tests.parity`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from engine.models.checkpoints.packaged import SMOLLM2_135M
from engine.models.checkpoints.prepared import Progress
from engine.models.checkpoints.source import default_cache, prepare_packaged
from tests.parity.conftest import CLASSES, FAMILY_SETTINGS, SHAPE, randomise
from tests.parity.exact import Errors
from tests.parity.subjects import FAMILIES, smollm2_subject, tiny_subject
from tests.parity.ways import WAYS, Subject, Workbench, compare, table


def _tiny(family: str, folder: Path) -> Subject:
    config_class, model_class = CLASSES[family]
    reference = model_class(config_class(**{**SHAPE, **FAMILY_SETTINGS[family]}, attn_implementation="eager")).eval()
    randomise(reference, 0)
    reference.save_pretrained(folder)
    return tiny_subject(folder, reference, all_windowed=family == "mistral")


def main() -> None:
    """Runs every family in every way; a row or text that differs too much is for the tests to tell."""
    measured: dict[tuple[str, str], Errors] = {}
    with tempfile.TemporaryDirectory() as name:
        subjects = {family: _tiny(family, Path(name) / family) for family in FAMILIES}
        subjects["SmolLM2"] = smollm2_subject(prepare_packaged(SMOLLM2_135M, default_cache(), Progress(print)))
        for family, subject in subjects.items():
            for way, run in WAYS.items():
                measured[family, way] = compare(subject, run(Workbench(subject, Path(tempfile.mkdtemp(dir=name)))))
    print("Largest relative L2 error of a row; median / 99.9th percentile / largest, ours to transformers' float32\n")
    print(table(measured))


if __name__ == "__main__":
    main()
