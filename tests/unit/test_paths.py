"""Client paths can only name files inside the allowed roots, and a path that is refused leaves no trace anywhere."""

import os
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import ConfigError
from engine.saves.libc import renameat2
from service.errors import NotFound, PathConflict, ServiceError
from service.saves.paths.roots import SaveRoots
from service.saves.targets import Targets

SAVE_ID = "0123456789abcdef0123456789abcdef"
RENAME_EXCHANGE = 2
SERVER_NAME = f"{SAVE_ID}.safetensors"


@dataclass(frozen=True)
class World:
    """Two roots with something in them, and places outside that nobody may touch."""

    base: Path
    roots: SaveRoots

    @property
    def default(self) -> Path:
        return self.base / "saves"

    @property
    def second(self) -> Path:
        return self.base / "second"

    @property
    def outside(self) -> Path:
        return self.base / "outside"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    base = tmp_path.resolve()
    for name in ("saves/dir/sub", "second", "outside/dir", "saves-evil"):
        (base / name).mkdir(parents=True)
    (base / "outside/file").write_bytes(b"secret")
    (base / "saves/file").write_bytes(b"old")
    (base / "saves/link-out").symlink_to(base / "outside")
    (base / "saves/link-in").symlink_to("dir")
    (base / "saves/link-root").symlink_to("/")
    (base / "saves/link-up").symlink_to("..")
    (base / "saves/link-file").symlink_to(base / "outside/file")
    (base / "saves/link-dangling").symlink_to(base / "outside/new")
    (base / "saves/link-loop").symlink_to("link-loop")
    (base / "saves/dir/link-out").symlink_to(base / "outside")
    os.mkfifo(base / "saves/fifo")
    roots = SaveRoots([str(base / "saves"), str(base / "second")])
    yield World(base, roots)
    roots.close()


def snapshot(base: Path) -> dict[str, tuple[int, int, bytes | str]]:
    """Every entry below a directory, with its mode, inode and content."""
    found: dict[str, tuple[int, int, bytes | str]] = {}
    for path in sorted(base.rglob("*")):
        status = path.lstat()
        content: bytes | str = b""
        if stat.S_ISLNK(status.st_mode):
            content = str(path.readlink())
        elif stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        found[str(path)] = (status.st_mode, status.st_ino, content)
    return found


# {base} stands for the directory that holds the roots `saves` (the default) and `second`, and `outside`.
ATTACKS: list[tuple[str, int]] = [
    # Malformed: empty, control characters, separators of other systems.
    ("", 400),
    ("a\0b", 400),
    ("\0", 400),
    ("good\0/../../outside/x", 400),
    ("a\nb", 400),
    ("a\r\nSet-Cookie: x", 400),
    ("a\tb", 400),
    ("a\x1b[2Jb", 400),
    ("a\x7fb", 400),
    ("a\x85b", 400),
    ("a\x9bb", 400),
    ("dir\\file", 400),
    ("..\\..\\outside\\x", 400),
    ("C:\\Windows\\x", 400),
    ("\\\\host\\share\\x", 400),
    ("a\ud800b", 400),
    ("\udcff", 400),
    # Empty and '.' segments.
    ("//", 400),
    ("//etc/passwd", 400),
    ("dir//x", 400),
    ("dir///", 400),
    ("file:///etc/passwd", 400),
    ("http://host/x", 400),
    (".", 400),
    ("./", 400),
    ("./x", 400),
    ("dir/./x", 400),
    ("dir/.", 400),
    ("{base}/saves/./x", 400),
    ("{base}/saves//x", 400),
    # Hidden and reserved names.
    (".hidden", 400),
    (".ssh/authorized_keys", 400),
    ("dir/.hidden/x", 400),
    ("...", 400),
    ("..../x", 400),
    (".. /x", 400),
    ("{base}/saves/.bashrc", 400),
    (f".{SAVE_ID}.part", 400),
    ("x.lock", 400),
    ("x.part", 400),
    ("x.LOCK", 400),
    ("x.lock/y", 400),
    ("dir/x.Part", 400),
    ("new/x.lock", 400),
    # Too long, in bytes.
    ("n" * 251, 400),
    ("é" * 126, 400),
    ("new/" + "n" * 251, 400),
    ("d" * 256 + "/x", 400),
    ("new/" + "d" * 256 + "/x", 400),
    ("d/" * 2100 + "x", 400),
    ("x" * 100_000, 400),
    # A component or target of the wrong kind.
    ("file/x", 400),
    ("file/", 400),
    ("file/new/x", 400),
    ("fifo", 400),
    ("fifo/x", 400),
    ("fifo/", 400),
    ("{base}/saves/file/x", 400),
    # '..' segments.
    ("..", 403),
    ("../", 403),
    ("../outside/x", 403),
    ("../outside/file", 403),
    ("../saves/x", 403),
    ("dir/../x", 403),
    ("dir/..", 403),
    ("new/../../outside/x", 403),
    ("dir/sub/../../../outside/x", 403),
    ("../../../../../../../../etc/passwd", 403),
    ("{base}/saves/../outside/x", 403),
    ("{base}/saves/..", 403),
    ("{base}/second/../saves/x", 403),
    ("/..", 403),
    ("/../etc/passwd", 403),
    # Absolute paths outside every root.
    ("/", 403),
    ("/etc/passwd", 403),
    ("/etc/", 403),
    ("/etc/ssh/authorized_keys", 403),
    ("/dev/null", 403),
    ("/proc/self/cwd/x", 403),
    ("/proc/self/fd/3/x", 403),
    ("/tmp", 403),
    ("/does/not/exist", 403),
    ("{base}", 403),
    ("{base}/", 403),
    ("{base}/x", 403),
    ("{base}/outside/x", 403),
    ("{base}/outside/file", 403),
    ("{base}/outside/missing/x", 403),
    ("{base}/saves-evil/x", 403),
    ("{base}/saves-evil", 403),
    ("{base}/save", 403),
    ("{base}/SAVES/x", 403),
    # Symbolic links at every place below a root.
    ("link-out/x", 403),
    ("link-out/file", 403),
    ("link-out/missing/x", 403),
    ("link-out/", 403),
    ("link-out", 403),
    ("link-in/x", 403),
    ("link-in/", 403),
    ("link-root/etc/passwd", 403),
    ("link-up/outside/x", 403),
    ("link-file", 403),
    ("link-file/", 403),
    ("link-file/x", 403),
    ("link-dangling", 403),
    ("link-dangling/x", 403),
    ("link-loop", 403),
    ("link-loop/x", 403),
    ("dir/link-out/x", 403),
    ("dir/link-out", 403),
    ("{base}/saves/link-out/x", 403),
    ("{base}/saves/dir/link-out/new/", 403),
]


def test_the_attack_list_is_long_enough() -> None:
    assert len({path for path, _ in ATTACKS}) >= 60


@pytest.mark.parametrize(("path", "status"), ATTACKS, ids=range(len(ATTACKS)))
def test_an_attack_is_refused_and_nothing_is_made_anywhere(world: World, path: str, status: int) -> None:
    path = path.replace("{base}", str(world.base))
    before = snapshot(world.base)
    targets = Targets(world.roots)
    for replace in (False, True):
        with pytest.raises(ServiceError) as refused:
            targets.claim(path, SAVE_ID, replace=replace)
        assert refused.value.status == status
        assert str(world.base) not in refused.value.message
        assert "outside/" not in refused.value.message
    assert snapshot(world.base) == before


def test_a_socket_is_not_a_target(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world.default)  # The path of a Unix socket has to be short.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        with pytest.raises(ServiceError) as refused:
            world.roots.resolve("socket", SAVE_ID)
    assert refused.value.status == 400


def test_the_answer_for_a_place_outside_tells_nothing_about_it(world: World) -> None:
    answers = set()
    for path in (
        "/outside/file",
        "/outside/missing",
        "/outside/dir/",
        "/saves/../outside/file",
        "/saves/link-out/file",
        "/saves/link-dangling",
    ):
        with pytest.raises(ServiceError) as refused:
            world.roots.resolve(str(world.base) + path, SAVE_ID)
        answers.add((refused.value.status, refused.value.code, refused.value.message, refused.value.param))
    assert len(answers) == 1


@dataclass(frozen=True)
class Accepted:
    asked: str | None
    made: str
    """Below {base}."""


ACCEPTED = [
    Accepted(None, f"saves/{SERVER_NAME}"),
    Accepted("x.safetensors", "saves/x.safetensors"),
    Accepted("no-suffix", "saves/no-suffix"),
    Accepted("file", "saves/file"),
    Accepted("new/er/x", "saves/new/er/x"),
    Accepted("new/", f"saves/new/{SERVER_NAME}"),
    Accepted("dir", f"saves/dir/{SERVER_NAME}"),
    Accepted("dir/", f"saves/dir/{SERVER_NAME}"),
    Accepted("dir/sub", f"saves/dir/sub/{SERVER_NAME}"),
    Accepted("{base}/saves", f"saves/{SERVER_NAME}"),
    Accepted("{base}/saves/", f"saves/{SERVER_NAME}"),
    Accepted("{base}/saves/x", "saves/x"),
    Accepted("{base}/second", f"second/{SERVER_NAME}"),
    Accepted("{base}/second/a/b", "second/a/b"),
    Accepted("é" * 125, "saves/" + "é" * 125),
    Accepted("d" * 255 + "/x", "saves/" + "d" * 255 + "/x"),
    Accepted("~/x", "saves/~/x"),
    Accepted("$HOME/%2e%2e/x", "saves/$HOME/%2e%2e/x"),
    Accepted("a b/ c", "saves/a b/ c"),
    Accepted("e\u0301/\u00e9/数据", "saves/e\u0301/\u00e9/数据"),
    Accepted("a..b/..c..".replace("/..", "/c.."), "saves/a..b/c..c.."),
    Accepted("x.lock.safetensors", "saves/x.lock.safetensors"),
    Accepted("-rf", "saves/-rf"),
]


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: repr(case.asked)[:40])
def test_an_honest_path_is_opened_where_it_says(world: World, case: Accepted) -> None:
    asked = case.asked and case.asked.replace("{base}", str(world.base))
    target = world.roots.resolve(asked, SAVE_ID)
    expected = world.base / case.made
    assert target.path == str(expected)
    assert target.name == expected.name
    assert os.path.samestat(os.fstat(target.directory_fd), expected.parent.stat())
    os.close(target.directory_fd)


def test_only_directories_are_accepted_for_many_files(world: World) -> None:
    for path in (None, "dir", "new/", str(world.default)):
        os.close(world.roots.resolve(path, SAVE_ID, directory_only=True).directory_fd)
    before = snapshot(world.base)
    for path in ("x", "file", "newer/x"):
        with pytest.raises(ServiceError) as refused:
            world.roots.resolve(path, SAVE_ID, directory_only=True)
        assert refused.value.status == 400
    assert snapshot(world.base) == before


def test_directories_are_made_with_the_asked_umask(tmp_path: Path) -> None:
    roots = SaveRoots([str(tmp_path / "deep/root")], umask=0o007)
    os.close(roots.resolve("a/b/", SAVE_ID).directory_fd)
    roots.close()
    for name in ("", "a", "a/b"):
        assert stat.S_IMODE((tmp_path / "deep/root" / name).stat().st_mode) == 0o770


def test_a_root_inside_another_is_opened_by_its_own_descriptor(tmp_path: Path) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "outer/inner"
    roots = SaveRoots([str(outer), str(inner)])
    inner.rename(tmp_path / "moved")
    (outer / "inner").symlink_to("/")
    target = roots.resolve(str(inner / "x"), SAVE_ID)
    assert os.path.samestat(os.fstat(target.directory_fd), (tmp_path / "moved").stat())
    os.close(target.directory_fd)
    roots.close()


def test_a_root_keeps_what_its_name_led_to_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    roots = SaveRoots([str(link)])
    link.unlink()
    link.symlink_to("/")
    for path in ("x", str(link / "x"), str(tmp_path / "real/x")):
        target = roots.resolve(path, SAVE_ID)
        assert target.path == str(tmp_path.resolve() / "real/x")
        assert os.path.samestat(os.fstat(target.directory_fd), (tmp_path / "real").stat())
        os.close(target.directory_fd)
    roots.close()


def test_the_working_directory_and_the_environment_do_not_matter(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world.outside)
    monkeypatch.setenv("HOME", str(world.outside))
    before = snapshot(world.outside)
    os.close(world.roots.resolve("~/x", SAVE_ID).directory_fd)
    assert snapshot(world.outside) == before


@pytest.mark.parametrize("kind", ["none", "file", "control"])
def test_a_root_that_can_not_work_is_refused_with_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    given = {"none": [], "file": [str(tmp_path / "file")], "control": [str(tmp_path / "a\nb")]}[kind]
    with pytest.raises(ConfigError, match="--save-root") as refused:
        SaveRoots(given)
    assert "\n" not in str(refused.value)


def test_the_same_root_given_twice_is_one(tmp_path: Path) -> None:
    roots = SaveRoots([str(tmp_path), f"{tmp_path}/", str(tmp_path / "x/..")])
    assert [root.path for root in roots.roots] == [str(tmp_path.resolve())]
    roots.close()


def test_a_link_that_replaces_a_directory_under_the_walk_never_leads_outside(world: World) -> None:
    """One thread exchanges a directory for a link to `outside` and back, as fast as it can, while others claim files in it."""
    stop = threading.Event()
    (world.default / "swap").mkdir()
    root_fd = world.roots.roots[0].fd
    exchange = renameat2
    assert exchange is not None
    outside = snapshot(world.outside)

    def swap() -> None:
        while not stop.is_set():
            exchange(root_fd, b"swap", root_fd, b"link-out", RENAME_EXCHANGE)

    swapper = threading.Thread(target=swap)
    swapper.start()
    targets = Targets(world.roots)
    outcomes: dict[int, int] = {}
    try:
        for attempt in range(8000):
            status = _claim_and_write(targets, f"swap/new{attempt}/x" if attempt % 2 else f"swap/{attempt}", f"{attempt:032x}")
            outcomes[status] = outcomes.get(status, 0) + 1
    finally:
        stop.set()
        swapper.join()
    assert set(outcomes) <= {200, 403}
    assert snapshot(world.outside) == outside


def _claim_and_write(targets: Targets, path: str, save_id: str) -> int:
    try:
        target = targets.claim(path, save_id, replace=False)
    except PathConflict:
        raise
    except ServiceError as error:
        return error.status
    try:
        os.close(os.open(target.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=target.directory_fd))
    finally:
        target.published()
    return 200


def test_a_walk_that_fails_half_way_removes_the_directories_it_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real_mkdir = os.mkdir

    def mkdir(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if path == "third":
            raise OSError(28, "No space left on device")
        real_mkdir(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", mkdir)
    before = snapshot(world.base)
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor must be closed at once
    with pytest.raises(ServiceError) as refused:
        world.roots.resolve("first/second/third/x", SAVE_ID)
    assert refused.value.status == 507
    assert snapshot(world.base) == before
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - as above


def test_a_refused_path_leaves_no_descriptor_open(world: World) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor must be closed at once
    for path in ("file/x", "dir/link-out/x", "fifo", "link-file"):
        with pytest.raises(ServiceError):
            world.roots.resolve(path, SAVE_ID)
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - as above


def test_a_recorded_path_is_located_without_making_anything(world: World) -> None:
    target = world.roots.locate(str(world.default / "dir/x"))
    assert target.name == "x"
    assert os.path.samestat(os.fstat(target.directory_fd), (world.default / "dir").stat())
    os.close(target.directory_fd)
    before = snapshot(world.base)
    with pytest.raises(NotFound):
        world.roots.locate(str(world.default / "gone/x"))
    for path in (world.default / "link-out/file", world.outside / "file"):
        with pytest.raises(ServiceError) as refused:
            world.roots.locate(str(path))
        assert refused.value.status == 403
    assert snapshot(world.base) == before


def test_the_file_system_of_a_recorded_path_is_that_of_the_last_folder_which_is_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = {path.stat().st_ino: number for number, path in enumerate((world.default, world.default / "dir", world.second), 100)}
    real_fstat, descriptors = os.fstat, len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the listing's own descriptor must be closed at once
    monkeypatch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_dev=devices.get(real_fstat(fd).st_ino), st_size=0))
    for path, device in {
        "saves/x": 100,
        "saves/missing/x": 100,
        "saves/file/x": 100,
        "saves/link-out/x": 100,
        "saves/link-dangling/missing/x": 100,
        "saves/dir/x": 101,
        "saves/dir/missing/deeper/x": 101,
        "saves/dir/link-out/x": 101,
        "second/x": 102,
        "outside/x": None,
        "saves-evil/x": None,
        "saves/../outside/x": None,
    }.items():
        assert world.roots.device_at(f"{world.base}/{path}") == device, path
    assert world.roots.device_at("") is None
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - as above


def test_a_file_system_is_the_same_by_its_number_and_where_it_was_recognized_under_a_new_one(world: World) -> None:
    assert world.roots.is_same_file_system(5, 5)
    assert not world.roots.is_same_file_system(5, 6)
    world.roots.recognize(5, 6)
    assert world.roots.is_same_file_system(5, 6)
    assert [world.roots.is_same_file_system(*pair) for pair in ((6, 5), (5, 7), (4, 6))] == [False, False, False]


def test_client_paths_are_rewritten_at_whole_components_both_ways(tmp_path: Path) -> None:
    base = tmp_path.resolve()
    pairs = [("/data", str(base / "saves")), ("/data/deep", str(base / "second"))]
    roots = SaveRoots([str(base / "saves"), str(base / "second")], client_path_map=pairs)

    def resolved(path: str) -> str:
        target = roots.resolve(path, SAVE_ID)
        os.close(target.directory_fd)
        return target.path

    assert resolved("/data/x") == str(base / "saves/x")
    assert resolved("/data") == str(base / "saves" / SERVER_NAME)
    assert resolved("/data/deep/x") == str(base / "second/x")
    assert resolved("data/x") == str(base / "saves/data/x")
    assert resolved(str(base / "saves/y")) == str(base / "saves/y")
    for outside in ("/database/x", "/dat/x", "/x/data/y", "/data/../x"):
        with pytest.raises(ServiceError) as refused:
            roots.resolve(outside, SAVE_ID)
        assert refused.value.status == 403
    assert roots.to_client(str(base / "saves/a/b")) == "/data/a/b"
    assert roots.to_client(str(base / "second/a")) == "/data/deep/a"
    assert roots.to_client(str(base / "saves2/a")) == str(base / "saves2/a")
    roots.close()


@pytest.mark.parametrize("pairs", [[("data", "/x")], [("/data", "x")], [("/a", "/x"), ("/a/", "/y")], [("/a/../b", "/x")]])
def test_a_path_map_that_can_not_work_is_refused(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError, match="--client-path-map"):
        SaveRoots([str(tmp_path)], client_path_map=pairs)
