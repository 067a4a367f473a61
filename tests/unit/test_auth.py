"""API keys at rest: what the file may hold, whom a key stands for, and how keys are made."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from engine.errors import ConfigError
from service.cli import main as cli
from service.http import auth
from service.http.auth import ApiKeys, hashed_line, new_key, read_keys

KEY = "sk-strata-" + "a" * 43
OTHER = "sk-strata-" + "b" * 43


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


BAD_LINES = [KEY, f"alice:{KEY}", f"alice {KEY}", f"sha256:{digest(KEY)}", f"sha256${digest(KEY)[:-1]}", f"sha256${digest(KEY).upper()}"]
BAD_LINES += [f"al ice:sha256${digest(KEY)}", f":sha256${digest(KEY)}", f"a$b:sha256${digest(KEY)}", f"{'x' * 65}:sha256${digest(KEY)}"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def header(key: str) -> bytes:
    return f"Bearer {key}".encode()


def test_a_line_is_an_owner_and_the_sha256_of_its_key(file: Path) -> None:
    file.write_text(f"# who\n\n  alice:sha256${digest(KEY)}  \nsha256${digest(OTHER)}\r\n")
    assert [(key.owner, key.digest.hex()) for key in read_keys(file)] == [
        ("alice", digest(KEY)),
        (f"sha256${digest(OTHER)[:16]}", digest(OTHER)),
    ]


def test_a_key_stands_for_its_owner_and_nothing_else_does(file: Path) -> None:
    file.write_text(f"{hashed_line(KEY, 'alice')}\n{hashed_line(OTHER, 'bob')}\n")
    keys = ApiKeys(file)
    assert keys.owner(header(KEY)) == "alice"
    assert keys.owner(header(OTHER)) == "bob"
    assert keys.owner(b"bearer  " + KEY.encode() + b" ") == "alice"
    refused = [b"", b"Bearer", b"Bearer ", KEY.encode(), header(KEY[:-1]), header(KEY + "x"), b"Basic " + KEY.encode(), b"Bearer \xff\xfe"]
    refused += [header(digest(KEY)), header(f"sha256${digest(KEY)}"), b"Bearer EMPTY", header(f"{KEY} {KEY}")]
    assert [keys.owner(value) for value in refused] == [None] * len(refused)


def test_two_keys_of_one_name_are_one_owner(file: Path) -> None:
    file.write_text(f"{hashed_line(KEY, 'alice')}\n{hashed_line(OTHER, 'alice')}\n")
    keys = ApiKeys(file)
    assert keys.owner(header(KEY)) == keys.owner(header(OTHER)) == "alice"


def test_every_key_is_compared_whichever_matches(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = auth.hmac.compare_digest

    def noting(one: bytes, two: bytes) -> bool:
        compared.append(one)
        return real(one, two)

    monkeypatch.setattr("service.http.auth.hmac.compare_digest", noting)
    known = [new_key() for _ in range(5)]
    file.write_text("\n".join(hashed_line(key) for key in known))
    keys = ApiKeys(file)
    for key in [known[0], known[-1], OTHER, ""]:
        compared.clear()
        keys.owner(header(key))
        assert [one.hex() for one in compared] == [digest(key) for key in known]


@pytest.mark.parametrize("line", BAD_LINES)
def test_anything_but_a_hash_is_refused_by_its_line_and_never_shown(file: Path, line: str) -> None:
    file.write_text(f"# a comment\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        ApiKeys(file)
    message = str(refused.value)
    assert f"--api-keys-file {file}: line 2 " in message
    assert "strata hash-key" in message
    assert KEY not in message
    assert "\n" not in message


def test_a_file_that_is_missing_empty_not_text_or_repeats_a_key_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(file)
    file.write_text("# nobody\n\n")
    with pytest.raises(ConfigError, match="it holds no key"):
        read_keys(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_keys(file)
    file.write_text(f"{hashed_line(KEY, 'alice')}\n{hashed_line(KEY, 'bob')}\n")
    with pytest.raises(ConfigError, match="a key twice"):
        read_keys(file)


def test_reading_again_takes_new_keys_and_keeps_the_old_ones_where_the_file_is_bad(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(hashed_line(KEY, "alice"))
    keys = ApiKeys(file)
    file.write_text(f"{hashed_line(OTHER, 'bob')}\n")
    keys.reload()
    assert (keys.owner(header(KEY)), keys.owner(header(OTHER))) == (None, "bob")
    for bad in (KEY, ""):
        file.write_text(bad)
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            keys.reload()
        assert "the keys stay as they were" in caplog.text
        assert KEY not in caplog.text
        assert keys.owner(header(OTHER)) == "bob"


def test_made_keys_are_long_and_never_the_same() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(len(key) >= 50 and key.startswith("sk-strata-") for key in made)


@pytest.mark.parametrize("key", ["", "short", "x" * 31, "x" * 40 + " y", "é" * 40, "x" * 40 + "\n" + "y"])
def test_a_key_that_could_be_guessed_or_not_be_sent_is_not_hashed(key: str) -> None:
    with pytest.raises(ConfigError, match="at least 32 printable ASCII"):
        hashed_line(key)


def test_hash_key_prints_the_line_for_the_file_and_shows_the_key_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hash-key", "--name", "alice"]) == 0
    shown = capsys.readouterr()
    key = shown.err.split()[-1]
    assert shown.out == f"alice:sha256${digest(key)}\n"
    assert key.startswith("sk-strata-")


def test_hash_key_hashes_a_key_of_ones_own(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(KEY + "\n"))
    assert cli.main(["hash-key", "--stdin"]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (f"sha256${digest(KEY)}\n", "")
    monkeypatch.setattr("sys.stdin", io.StringIO("secret\n"))
    assert cli.main(["hash-key", "--stdin"]) == 2
    assert "secret" not in capsys.readouterr().err
    assert cli.main(["hash-key", "--name", "a b"]) == 2
