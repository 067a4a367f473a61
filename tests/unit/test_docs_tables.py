"""Tables of the documentation, held against the code: fields of `kv_transfer_params`, and codes of errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import service
from engine.errors import SaveErrorCode
from service.http.errors import HTTP_CODES
from service.runtime import RuntimeState
from service.schemas.transfer import TransferParams

ROOT = Path(__file__).parents[2]
API = (ROOT / "docs" / "api.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def section(page: str, title: str) -> str:
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def codes_in_the_sources() -> Iterator[str]:
    for source in Path(service.__file__).parent.rglob("*.py"):
        yield from re.findall(r'\b(?:default_code|code)(?:: \w+)? ?= ?"(\w+)"', source.read_text())


def test_the_api_page_has_a_row_for_every_field_of_kv_transfer_params() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", section(API, "Fields of `kv_transfer_params`"), flags=re.MULTILINE)
    assert sorted(rows) == sorted(TransferParams.model_fields)


def test_the_operations_page_says_what_to_do_about_every_error_code() -> None:
    table = section(OPERATIONS, "Troubleshooting")
    states = {f"engine_{state}" if state == "dead" else state for state in get_args(RuntimeState)} - {"ok"}
    codes = {*codes_in_the_sources(), *HTTP_CODES.values(), *get_args(SaveErrorCode), *states}
    assert sorted(code for code in codes if f"`{code}`" not in table) == []
