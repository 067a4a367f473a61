"""What `strata serve` tells the libraries beneath it before they are loaded, and leaves to the operator."""

import os

import pytest

from service.cli import main as cli

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, str(cli.SPINS)), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "passive"}, None)],
    ids=["nothing", "spins", "policy"],
)
def test_serving_bounds_spinning_and_compiled_products(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], spins: str | None) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that the test's end puts back what was there
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen: dict[str, str] = {}
    monkeypatch.setattr("service.http.server.serve", lambda settings: seen.update(os.environ) or 0)
    monkeypatch.setattr("service.observe.logs.configure_logging", lambda *arguments: None)
    assert cli.main(["serve"]) == 0
    assert seen.get("GOMP_SPINCOUNT") == spins
    assert seen["LRU_CACHE_CAPACITY"] == seen["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(cli.COMPILED_SHAPES)
