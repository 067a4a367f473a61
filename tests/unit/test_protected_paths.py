"""A save root gives away no file of the service: settings that would let a client's path name one are refused, both by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from service.config.settings import Settings, load_settings
from service.saves.paths.protected import check_model, check_roots


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working directory too."""
    base = tmp_path.resolve()
    monkeypatch.chdir(base)
    for name in ("API_KEYS_FILE", "SAVE_ROOT", "STATE_DIR", "MODEL"):
        monkeypatch.delenv(f"STRATA_{name}", raising=False)
    return base


def settings(base: Path, config: Path | None = None, **changes: Any) -> Settings:  # noqa: ANN401 - settings
    known: dict[str, Any] = {"save_root": [base / "saves"], "state_dir": base / "state"}
    return load_settings(known | changes, config)


def refusal(check: Callable[[], None]) -> str:
    with pytest.raises(ConfigError) as refused:
        check()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_folders_beside_each_other_are_accepted(base: Path) -> None:
    (base / "keys").touch()
    (base / "strata.toml").touch()
    check_roots(settings(base, base / "strata.toml", api_keys_file=base / "keys"))
    check_roots(settings(base, state_dir=base / "saves-state"))
    check_roots(settings(base, save_root=[base / "state-saves"]))
    assert sorted(path.name for path in base.iterdir()) == ["keys", "strata.toml"], "nothing is made"


def test_the_defaults_are_accepted(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for home in (base, base / "home"):
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.delenv("XDG_DATA_HOME", raising=False)
        check_roots(load_settings({}))


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("below", ["", "state", ".hidden/state", "a/b"])
def test_a_state_directory_in_a_save_root_is_refused(base: Path, below: str, made: bool) -> None:
    state = base / "saves" / below
    if made:
        state.mkdir(parents=True)
    for root in (Path("saves"), base / "saves", Path("x/../saves"), base / "x/../saves"):
        found = refusal(lambda root=root: check_roots(settings(base, save_root=[base / "other", root], state_dir=state)))
        assert found == f"--state-dir {state} lies in --save-root {root}, where clients could replace it"
    assert (base / "saves").exists() is made


def test_a_state_directory_that_is_named_relatively_is_refused(base: Path) -> None:
    assert "--state-dir" in refusal(lambda: check_roots(settings(base, save_root=["."], state_dir="state")))


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("below", ["saves", "models", "a/b"])
def test_a_save_root_in_the_state_directory_is_refused(base: Path, below: str, made: bool) -> None:
    root = base / "state" / below
    if made:
        root.mkdir(parents=True)
    found = refusal(lambda: check_roots(settings(base, save_root=[base / "fine", root])))
    assert found == f"--save-root {root} lies in --state-dir {base / 'state'}, which belongs to the service alone"


@pytest.mark.parametrize("setting", ["api_keys_file", "config"])
def test_a_file_of_the_service_in_a_save_root_is_refused(base: Path, setting: str) -> None:
    file = base / "saves/sub/file"
    file.parent.mkdir(parents=True)
    file.touch()

    def check() -> None:
        check_roots(settings(base, file) if setting == "config" else settings(base, **{setting: file}))

    flag = {"api_keys_file": "--api-keys-file", "config": "--config"}[setting]
    assert refusal(check) == f"{flag} {file} lies in --save-root {base / 'saves'}, where clients could replace it"


def test_a_save_root_beside_a_file_of_the_service_is_accepted(base: Path) -> None:
    (base / "etc").mkdir()
    (base / "etc/keys").touch()
    check_roots(settings(base, save_root=[base / "etc/saves"], api_keys_file=base / "etc/keys"))


def test_links_are_resolved_on_both_sides(base: Path) -> None:
    (base / "saves").mkdir()
    (base / "link-to-root").symlink_to("saves")
    (base / "link-into-root").symlink_to("saves/state")
    assert "--state-dir" in refusal(lambda: check_roots(settings(base, state_dir=base / "link-into-root")))
    assert "--state-dir" in refusal(lambda: check_roots(settings(base, state_dir=base / "link-to-root/state")))
    assert "--state-dir" in refusal(lambda: check_roots(settings(base, save_root=[base / "link-to-root"], state_dir=base / "saves/state")))
    assert "lies in --state-dir" in refusal(
        lambda: check_roots(settings(base, save_root=[base / "link-into-root"], state_dir=base / "saves"))
    )


def test_a_link_in_a_save_root_that_leads_out_is_refused_since_the_link_can_be_replaced(base: Path) -> None:
    (base / "saves").mkdir()
    (base / "elsewhere").mkdir()
    (base / "elsewhere/keys").touch()
    (base / "saves/link").symlink_to(base / "elsewhere")
    assert "--api-keys-file" in refusal(lambda: check_roots(settings(base, api_keys_file=base / "saves/link/keys")))


def test_a_folder_with_two_names_is_one(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a folder that is mounted in two places: its names have nothing in common, but device and inode are the same."""
    (base / "saves").mkdir()
    (base / "mounted").mkdir()
    stat = Path.stat

    def as_mounted(path: Path, **options: Any) -> object:  # noqa: ANN401 - passed on
        return stat(base / "saves" if path == base / "mounted" else path, **options)

    monkeypatch.setattr(Path, "stat", as_mounted)
    assert "--state-dir" in refusal(lambda: check_roots(settings(base, state_dir=base / "mounted/state")))


def test_a_root_of_everything_is_refused(base: Path) -> None:
    assert "--state-dir" in refusal(lambda: check_roots(settings(base, save_root=["/"])))


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_model_beside_the_save_roots_is_accepted(base: Path) -> None:
    folder = model_folder(base / "model")
    (folder / "subfolder").mkdir()
    check_model(settings(base, model=str(folder)), folder)
    check_model(settings(base), folder)
    check_model(settings(base, model="owner/name"), folder)


def test_a_save_root_in_a_model_folder_is_accepted(base: Path) -> None:
    folder = model_folder(base / "model")
    (folder / "saves").mkdir()
    check_model(settings(base, model=str(folder), save_root=[folder / "saves"]), folder)


@pytest.mark.parametrize("below", ["", "model", "a/b"])
def test_a_model_in_a_save_root_is_refused(base: Path, below: str) -> None:
    folder = base / "saves" / below
    folder.mkdir(parents=True)
    found = refusal(lambda: check_model(settings(base, model="owner/name"), folder))
    assert found == f"--model {folder} lies in --save-root {base / 'saves'}, where clients could replace it"


def test_a_gguf_file_in_a_save_root_is_refused_although_it_is_loaded_from_elsewhere(base: Path) -> None:
    converted = model_folder(base / "state/models/x")
    (base / "saves").mkdir()
    (base / "saves/x.gguf").touch()
    found = refusal(lambda: check_model(settings(base, model="saves/x.gguf"), converted))
    assert found.startswith("--model saves/x.gguf lies in --save-root ")


def test_weights_that_are_links_into_a_save_root_are_refused(base: Path) -> None:
    folder = model_folder(base / "model")
    (base / "saves").mkdir()
    (base / "saves/weights").touch()
    (folder / "model.safetensors").symlink_to("../saves/weights")
    found = refusal(lambda: check_model(settings(base), folder))
    assert found.startswith(f"--model {folder / 'model.safetensors'} lies in --save-root ")


def test_the_file_of_settings_is_known_to_them(base: Path) -> None:
    (base / "strata.toml").write_text("port = 1")
    assert load_settings({}, base / "strata.toml").config_file == base / "strata.toml"
    assert load_settings({}).config_file is None
    assert Settings().config_file is None
