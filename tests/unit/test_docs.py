"""What the documentation says, held against the code and the files there are."""

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def functions_of(page: Path) -> dict[str, Any]:
    """Everything that the page's Python examples define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(block, names)
    return names


def test_the_reader_in_the_documentation_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    states = torch.randn(5, 2, 8).to(torch.bfloat16)
    tokens = torch.arange(5)
    save_file({"hidden_states": states, "token_ids": tokens}, tmp_path / "x.safetensors", {"layers": "[2, 30]"})
    shown = functions_of(ROOT / "docs" / "file-format.md")

    metadata, tensors = shown["read"](tmp_path / "x.safetensors")

    assert metadata == {"layers": "[2, 30]"}
    dtype, shape, data = tensors["hidden_states"]
    assert (dtype, shape) == ("BF16", [5, 2, 8])
    assert numpy.array_equal(shown["bfloat16_rows"](shape, data), states.float().numpy())
    assert tensors["token_ids"][2] == tokens.numpy().tobytes()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def anchors_of(page: Path) -> set[str]:
    """GitHub's anchors of the page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    missing = [f"{target}#{anchor}" for target, anchor in links if anchor not in anchors_of(page.parent / target if target else page)]
    assert missing == []


def test_modules_named_in_the_architecture_page_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## Source tree")[2]
    for section in page.split("### `")[1:]:
        package = section.partition("`")[0]
        cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        modules = [name for cell in cells for name in re.findall(r"`([\w/.]+)`", cell)]
        assert modules
        assert [name for name in modules if not (ROOT / package / name).exists()] == []
