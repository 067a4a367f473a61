"""Every row of every layer, and the text, against transformers in float64, however the request was run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.parity.conftest import RECURRENT
from tests.parity.exact import Errors
from tests.parity.subjects import FAMILIES, smollm2_subject, tiny_subject
from tests.parity.ways import WAYS, Subject, Workbench, compare, table

PACKED_ROW = 5e-4
"""Largest relative L2 error of a row where weights are packed for oneDNN, which sums in an order of its own: single rows are further off
than the yardstick allows."""


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[tuple[str, str], Errors]]:
    """What was measured; `pytest -s` shows it."""
    errors: dict[tuple[str, str], Errors] = {}
    yield errors
    print("\n" + table(errors))


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[..., object]) -> Callable[[str], Subject]:
    made: dict[str, Subject] = {}

    def make(family: str) -> Subject:
        if family not in made:
            model = tiny_model(family)
            made[family] = tiny_subject(model.folder, model.reference, all_windowed=family == "mistral")
        return made[family]

    return make


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Subject:
    return smollm2_subject(smollm2_folder)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_text_of_a_tiny_model_equal_transformers(
    family: str, way: str, tiny: Callable[[str], Subject], measured: dict[tuple[str, str], Errors], tmp_path: Path
) -> None:
    subject = tiny(family)
    errors = measured[family, way] = compare(subject, WAYS[way](Workbench(subject, tmp_path)))
    errors.check(recurrent=family in RECURRENT)


@pytest.mark.parametrize("way", ["cold", "full prefix hit", "preempted and resumed", "among 32 others", "output tokens"])
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_recurrent_states_are_right_where_a_step_is_launched_before_the_last_one_has_ended(
    family: str, way: str, tiny: Callable[[str], Subject], tmp_path: Path
) -> None:
    subject = tiny(family)
    compare(subject, WAYS[way](Workbench(subject, tmp_path, overlap="on"))).check(recurrent=True)


@pytest.mark.parametrize("way", WAYS)
def test_rows_and_text_of_smollm2_equal_transformers(
    way: str, smollm2: Subject, measured: dict[tuple[str, str], Errors], tmp_path: Path
) -> None:
    errors = measured["SmolLM2", way] = compare(smollm2, WAYS[way](Workbench(smollm2, tmp_path)))
    errors.check()


@pytest.mark.parametrize("way", ["cold", "chunks of 7", "full prefix hit", "among 32 others"])
def test_rows_and_text_of_smollm2_with_packed_weights(
    way: str, smollm2: Subject, measured: dict[tuple[str, str], Errors], tmp_path: Path
) -> None:
    errors = measured["SmolLM2, packed", way] = compare(smollm2, WAYS[way](Workbench(smollm2, tmp_path, "on")))
    assert 0 < errors.row <= PACKED_ROW
