"""Settings from flags, environment and file; what the operator hears of bad ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.models.checkpoints.packaged import SMOLLM2_135M
from service.cli import main as cli
from service.config.settings import BadSettings, Settings, engine_config, load_settings
from service.config.units import format_size, parse_duration, parse_size


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("STRATA_")]:
        monkeypatch.delenv(name)


def problems(flags: dict[str, object], config_file: Path | None = None) -> list[str]:
    with pytest.raises(BadSettings) as refused:
        load_settings(flags, config_file)
    return refused.value.lines


def test_defaults_are_those_of_the_contract() -> None:
    settings = load_settings({})
    expected = {
        "model": None,
        "served_model_name": None,
        "host": "127.0.0.1",
        "port": 8000,
        "layers": None,
        "api_keys_file": None,
        "cors_origin": (),
        "allowed_host": (),
        "extract_by_default": False,
        "save_root": (Path("saves"),),
        "device": "auto",
        "dtype": "auto",
        "attention": "auto",
        "cuda_graphs": "auto",
        "overlap": "auto",
        "native_kernels": "auto",
        "packed_weights": "auto",
        "trim_last_layer": True,
        "max_model_len": None,
        "block_size": None,
        "state_page_size": 32,
        "kv_cache_tokens": None,
        "kv_cache_memory": None,
        "self_check": True,
        "snapshot_distance": 1024,
        "recurrent_state_memory": None,
        "state_cache_memory": None,
        "prefault_caches": False,
        "prefix_cache": True,
        "max_batch_tokens": None,
        "prompt_logprobs_memory": 256 * 2**20,
        "inter_token_ms": None,
        "max_logprobs": 20,
        "max_running": 256,
        "max_queued": 1024,
        "durability": "file",
        "checksum": "none",
        "max_saved_bytes": None,
        "min_free_bytes": None,
        "ttl_seconds": None,
        "keep_records": 7 * 86400,
        "lock_files": True,
        "umask": None,
        "client_path_map": (),
        "drain_seconds": 30,
        "log_format": "text",
        "log_level": "info",
        "log_prompts": False,
        "otlp_endpoint": None,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "threads": None,
    }
    assert settings.model_dump(exclude={"state_dir"}) == expected


def test_the_state_directory_is_in_the_users_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert load_settings({}).state_dir == Path("/data/strata")


def test_flags_win_over_the_environment_and_that_over_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "strata.toml"
    file.write_text('port = 1\nmax_running = 1\nmax_queued = 1\nlayers = [1, "norm"]\nsave_root = ["/a", "/b"]\n')
    monkeypatch.setenv("STRATA_PORT", "2")
    monkeypatch.setenv("STRATA_MAX_RUNNING", "2")
    settings = load_settings({"port": "3"}, file)
    assert (settings.port, settings.max_running, settings.max_queued) == (3, 2, 1)
    assert settings.layers == (1, "norm")
    assert settings.save_root == (Path("/a"), Path("/b"))


def test_lists_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_SAVE_ROOT", "/a:/b")
    monkeypatch.setenv("STRATA_LAYERS", "2, -1,norm")
    monkeypatch.setenv("STRATA_CLIENT_PATH_MAP", "/x=/y")
    settings = load_settings({})
    assert settings.save_root == (Path("/a"), Path("/b"))
    assert settings.layers == (2, -1, "norm")
    assert settings.client_path_map == (("/x", "/y"),)


def test_an_empty_environment_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_PORT", "")
    assert load_settings({}).port == 8000


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("port", "70000", "--port: input should be less than or equal to 65535, got '70000'"),
        ("port", "eight", "--port: input should be a valid integer, unable to parse string as an integer, got 'eight'"),
        ("dtype", "int8", "--dtype: input should be 'auto', 'float32', 'bfloat16' or 'float16', got 'int8'"),
        ("layers", "2,x", "--layers: '2,x' is not a comma-separated list of layer ids: integers or 'norm'"),
        ("umask", "09", "--umask: '09' is not an octal number such as 022"),
        ("client_path_map", ["/a"], "--client-path-map: '/a' is not FROM=TO with two absolute paths, got ['/a']"),
        ("tensor_parallel", "2", "--tensor-parallel: 2 devices are not supported, only 1, got '2'"),
        ("pipeline_parallel", "4", "--pipeline-parallel: 4 devices are not supported, only 1, got '4'"),
        ("state_page_size", "0", "--state-page-size: input should be greater than or equal to 1, got '0'"),
        ("state_page_size", "4097", "--state-page-size: input should be less than or equal to 4096, got '4097'"),
        ("inter_token_ms", "-1", "--inter-token-ms: input should be greater than or equal to 0, got '-1'"),
        ("inter_token_ms", "inf", "--inter-token-ms: input should be a finite number, got 'inf'"),
        ("max_logprobs", "-2", "--max-logprobs: input should be greater than or equal to -1, got '-2'"),
        ("max_running", "0", "--max-running: input should be greater than or equal to 1, got '0'"),
    ],
)
def test_a_bad_flag_is_one_line_that_names_flag_and_bound(flag: str, value: object, expected: str) -> None:
    assert problems({flag: value}) == [expected]


def test_a_bad_size_is_one_line() -> None:
    assert problems({"kv_cache_memory": "4 gallons"})[0].startswith("--kv-cache-memory: '4 gallons' is not a size above 0")


def test_every_problem_has_a_line_and_names_its_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "strata.toml"
    file.write_text("max_queued = -1\nmax_quued = 3\n")
    monkeypatch.setenv("STRATA_MAX_RUNNING", "many")
    lines = problems({"port": "x"}, file)
    assert [line.split(":")[0] for line in lines] == [
        "--port",
        "STRATA_MAX_RUNNING",
        f"max_queued in {file}",
        f"max_quued in {file}",
    ]
    assert lines[3].endswith("there is no such setting")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("port = = 1")
    assert problems({}, tmp_path / "missing.toml") == [f"--config {tmp_path / 'missing.toml'}: No such file or directory"]
    assert problems({}, broken)[0].startswith(f"--config {broken}: ")


def test_two_sizes_of_one_cache_exclude_each_other() -> None:
    assert problems({"kv_cache_tokens": "10", "kv_cache_memory": "1GiB"}) == ["--kv-cache-tokens and --kv-cache-memory exclude each other"]


def test_the_engine_gets_what_was_set() -> None:
    flags = {"kv_cache_memory": "512MiB", "state_cache_memory": "auto", "block_size": "22", "prefix_cache": False, "checksum": "sha256"}
    config = engine_config(load_settings(flags), Path("/model"), 0o027)
    assert (config.model, config.kv_cache_memory, config.state_cache_memory) == ("/model", 512 * 2**20, None)
    assert (config.block_size, config.prefix_cache, config.checksum, config.umask) == (22, False, "sha256", 0o027)


def test_the_engine_gets_how_large_pages_are_and_how_long_text_may_wait() -> None:
    config = engine_config(load_settings({"state_page_size": "4096", "inter_token_ms": "0"}), Path("/model"), 0o022)
    assert (config.state_page_size, config.inter_token_ms) == (4096, 0)
    config = engine_config(load_settings({"inter_token_ms": "auto"}), Path("/model"), 0o022)
    assert (config.state_page_size, config.inter_token_ms) == (32, None)
    assert engine_config(load_settings({"inter_token_ms": "12.5"}), Path("/model"), 0o022).inter_token_ms == 12.5


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 2**29), ("4GiB", 2**32), ("1.5 GB", 1_500_000_000), ("1kb", 1000), ("77", 77), ("2TiB", 2**41), ("8b", 8)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1XiB", "GiB", "0.2", "1e9", "0KiB", "1,5GiB", "4.GiB", "4 GiB x", "4g", "64kbit", "1_000", "9" * 400 + "GiB"]
)
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size above 0"):
        parse_size(text)


@pytest.mark.parametrize(("text", "seconds"), [("7d", 604800), ("12h", 43200), ("90", 90), ("1.5 m", 90), ("2w", 1209600), ("30s", 30)])
def test_times_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == load_settings({"keep_records": text}).keep_records == seconds


@pytest.mark.parametrize("text", ["", "-1", "1y", "d", "1e3", "0", "0d", "999999w"])
def test_records_are_kept_for_some_time(text: str) -> None:
    assert problems({"keep_records": text})[0].startswith("--keep-records: ")


def test_nothing_need_be_kept_free_and_nothing_need_bound_what_is_saved() -> None:
    settings = load_settings({"min_free_bytes": "0", "max_saved_bytes": "none"})
    assert (settings.min_free_bytes, settings.max_saved_bytes) == (0, None)
    settings = load_settings({"min_free_bytes": "2GiB", "max_saved_bytes": "1TiB", "ttl_seconds": "60"})
    assert (settings.min_free_bytes, settings.max_saved_bytes, settings.ttl_seconds) == (2**31, 2**40, 60)


def test_sizes_are_shown_in_binary_units() -> None:
    assert [format_size(size) for size in (5, 2048, 3 * 2**20, 2**32, 2**43)] == ["5 B", "2.0 KiB", "3.0 MiB", "4.0 GiB", "8.0 TiB"]


def test_help_shows_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in text
    assert text.count("(default: ") == len(Settings.model_fields)
    assert f"(default: {SMOLLM2_135M.name}, embedded)" in text


def test_bad_settings_end_the_command_with_2_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["serve", "--port", "x", "--max-running", "0"])
    output = capsys.readouterr()
    assert (status, output.out) == (2, "")
    lines = output.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("strata: --") for line in lines)


def test_a_missing_model_ends_the_command_with_2_and_one_line(tmp_path: Path) -> None:
    flags = ["--model", "./no/such/folder", "--save-root", str(tmp_path / "saves"), "--state-dir", str(tmp_path / "state"), "--port", "0"]
    ended = subprocess.run([sys.executable, "-m", "service", "serve", *flags], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert sum("no/such/folder" in line for line in ended.stderr.splitlines()) == 1


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that `serve` would run with."""
    known: list[Settings] = []
    monkeypatch.setattr("service.http.server.serve", lambda settings: known.append(settings) or 0)
    monkeypatch.setattr("service.observe.logs.configure_logging", lambda *_: None)
    return known


def test_layers_may_begin_with_a_dash(served: list[Settings]) -> None:
    assert cli.main(["serve", "--layers", "-1,norm", "--port", "0"]) == 0
    assert (served[0].layers, served[0].port) == ((-1, "norm"), 0)


def test_every_value_of_a_repeated_flag_is_taken_whole(served: list[Settings]) -> None:
    folders = ["/data/a,b", "/data/c:d", "/data/e"]
    maps = ["/x=/data/a,b", "/y=/data/c:d"]
    flags = [f"--save-root={folder}" for folder in folders] + [f"--client-path-map={pair}" for pair in maps]
    assert cli.main(["serve", *flags]) == 0
    assert served[0].save_root == tuple(map(Path, folders))
    assert served[0].client_path_map == (("/x", "/data/a,b"), ("/y", "/data/c:d"))


def test_the_last_of_a_flag_that_does_not_repeat_counts(served: list[Settings]) -> None:
    assert cli.main(["serve", "--layers", "1", "--layers", "2", "--prefix-cache", "--no-prefix-cache"]) == 0
    assert (served[0].layers, served[0].prefix_cache) == ((2,), False)


def test_a_flag_is_taken_as_it_is_written(served: list[Settings]) -> None:
    assert cli.main(["serve", "--served-model-name", "null"]) == 0
    assert served[0].served_model_name == "null"


def test_an_empty_flag_is_a_bad_value_not_an_absent_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--port", "", "--model", ""]) == 2
    assert [line.partition(": ")[2].partition(":")[0] for line in capsys.readouterr().err.splitlines()] == ["--model", "--port"]


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("strata ")


def test_an_unknown_command_is_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["sreve"])
    assert ended.value.code == 2


def test_origins_are_flags_that_repeat_or_one_variable_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings({"cors_origin": ["https://a.example", "http://b.example:81"]}).cors_origin == (
        "https://a.example",
        "http://b.example:81",
    )
    monkeypatch.setenv("STRATA_CORS_ORIGIN", "https://a.example,*")
    assert load_settings({}).cors_origin == ("https://a.example", "*")


@pytest.mark.parametrize(
    "origin", ["a.example", "https://a.example/", "https://a.example/path", "https://", "https://a b", "https://u@a.example"]
)
def test_what_no_browser_sends_is_no_origin(origin: str) -> None:
    assert problems({"cors_origin": [origin]})[0].startswith("--cors-origin: ")
