"""Users that a container runs as: of no list of users, so without a home, and with a root file system that can't be written."""

import pwd
import sys
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.models.checkpoints import source
from engine.models.checkpoints.packaged import SMOLLM2_135M
from engine.models.checkpoints.source import DEFAULT_MODEL, resolve_model
from service.cli.main import main
from service.config.settings import load_settings


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_DATA_HOME", "STRATA_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("homeless")
class TestWithoutAHome:
    @pytest.mark.parametrize("command", ["serve", "models"])
    def test_one_line_says_what_to_give(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([command]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "--state-dir" in line

    def test_a_state_directory_is_enough(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STRATA_STATE_DIR", str(tmp_path))
        assert load_settings({}).state_dir == tmp_path

    def test_a_model_below_the_home_directory_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"~/model.*home"):
            resolve_model("~/model", cache=tmp_path)


class TestAnInstalledDefaultModel:
    @pytest.fixture
    def installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A Python environment that has been installed with the model inside."""
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
        folder = source._cache_folder(tmp_path / "environment" / "share" / "strata" / "models", SMOLLM2_135M.name, SMOLLM2_135M.sha256)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        return folder

    def test_it_is_taken_where_it_lies_and_the_cache_is_not_touched(self, installed: Path, tmp_path: Path) -> None:
        for name in (None, DEFAULT_MODEL):
            found = resolve_model(name, cache=tmp_path / "cache")
            assert (found.folder, found.name, found.revision) == (installed, DEFAULT_MODEL, SMOLLM2_135M.sha256[:12])
        assert list(tmp_path.iterdir()) == [tmp_path / "environment"]
