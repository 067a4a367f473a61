"""All settings of a service: by flag, environment variable (`STRATA_<NAME>`) or file; flags win, then the environment, then the file."""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic.config import JsonDict
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from engine.config import AttentionName, Checksum, Durability, EngineConfig, Switch
from engine.layers import LayerId
from engine.models.checkpoints.packaged import SMOLLM2_135M
from engine.models.checkpoints.prepared import user_data_directory
from service.config import values
from service.config.units import MAX_TTL_SECONDS

ENV_PREFIX = "STRATA_"
LogLevel = Literal["debug", "info", "warning", "error"]


class BadSettings(Exception):
    """Invalid settings; one line per problem."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


Size = Annotated[int | None, BeforeValidator(values.size_or_auto)]
Count = Annotated[int | None, BeforeValidator(values.number_or_auto)]
Milliseconds = Annotated[float | None, BeforeValidator(values.number_or_auto)]


def _option(default: Any, group: str, text: str, shown: str = "", metavar: str = "", **bounds: Any) -> Any:  # noqa: ANN401 - like pydantic's Field
    extra: JsonDict = {"group": group, "shown": shown, "metavar": metavar}
    if callable(default):
        return Field(default_factory=default, description=text, json_schema_extra=extra, **bounds)
    return Field(default, description=text, json_schema_extra=extra, **bounds)


class Settings(BaseSettings):
    """The settings of one service. `json_schema_extra` says how `strata serve --help` shows a field."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True)

    model: str | None = _option(
        None, "Model", "model folder, .gguf file or hub id", f"{SMOLLM2_135M.name}, embedded", "MODEL", min_length=1
    )
    served_model_name: str | None = _option(None, "Model", "model id in /v1/models; requests must use it", "the --model string", "NAME")
    device: str = _option("auto", "Model", "cpu, cuda or cuda:INDEX", metavar="DEVICE")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option("auto", "Model", "compute dtype")
    max_model_len: int | None = _option(None, "Model", "context limit in tokens", "the model's", "TOKENS", ge=1)
    attention: AttentionName = _option("auto", "Model", "attention backend; auto selects the first that can run")
    cuda_graphs: Switch = _option("auto", "Model", "replay decoding steps as CUDA graphs")
    overlap: Switch = _option("auto", "Model", "on a GPU, launch a decoding step before the previous one's tokens are read")
    self_check: bool = _option(True, "Model", "compute a short prompt in two ways at start; the service starts only if they agree")
    native_kernels: Switch = _option("auto", "Model", "compiled kernels on a CPU; auto uses them if a C compiler can build them")
    packed_weights: Switch = _option("auto", "Model", "pack weights for oneDNN on a CPU; auto times both variants at start")
    trim_last_layer: bool = _option(
        True, "Model", "in the last layer, compute only keys and values of rows that are neither saved nor sampled"
    )
    threads: int | None = _option(None, "Model", "compute threads on a CPU", "from CPU affinity and quota", "COUNT", ge=1)
    tensor_parallel: int = _option(1, "Model", "devices that share each layer; only 1 is supported", metavar="COUNT", ge=1)
    pipeline_parallel: int = _option(1, "Model", "devices that the layers are divided among; only 1 is supported", metavar="COUNT", ge=1)

    host: str = _option("127.0.0.1", "Network", "address to listen on", metavar="ADDRESS")
    port: int = _option(8000, "Network", "port to listen on; 0 selects a free port", metavar="PORT", ge=0, le=65535)
    api_keys_file: Path | None = _option(None, "Network", "hashed API keys, see `strata hash-key`", "no key required", "FILE")
    cors_origin: Annotated[tuple[str, ...], NoDecode, BeforeValidator(values.origins)] = _option(
        (), "Network", "allow web pages of this origin to call the API; repeatable, * for all", "none", "ORIGIN"
    )
    allowed_host: Annotated[tuple[str, ...], NoDecode, BeforeValidator(values.hosts)] = _option(
        (),
        "Network",
        "accept requests for this host name as well as for this machine's names; repeatable, *.example.org for subdomains, * for all",
        "none on a loopback address, else all",
        "HOST",
    )
    drain_seconds: float = _option(30.0, "Network", "time for running requests to finish after SIGTERM", metavar="SECONDS", ge=0)

    layers: Annotated[tuple[LayerId, ...] | None, NoDecode, BeforeValidator(values.layers)] = _option(
        None, "Hidden states", "default layers, comma separated: 0…N, negatives, norm", "2,N//2,N-3,N", "LAYERS"
    )
    extract_by_default: bool = _option(False, "Hidden states", "save hidden states for requests without kv_transfer_params, too")
    save_root: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(values.paths)] = _option(
        (Path("saves"),),
        "Hidden states",
        "folder for files, created if missing; repeatable, the first is the default",
        "./saves",
        "DIR",
        min_length=1,
    )
    state_dir: Path = _option(user_data_directory, "Hidden states", "folder of the registry and caches", "the user's data folder", "DIR")
    durability: Durability = _option("file", "Hidden states", "what is synced before a file is published")
    checksum: Checksum = _option("none", "Hidden states", "checksum kept in the record of a save")
    lock_files: bool = _option(True, "Hidden states", "hold FILE.lock while a file is written")
    max_saved_bytes: Annotated[int | None, BeforeValidator(values.size_or_none)] = _option(
        None, "Hidden states", "limit on the size of all saved files; requests above it get 507", "none", "SIZE", ge=1
    )
    min_free_bytes: Annotated[int | None, BeforeValidator(values.size_or_zero)] = _option(
        None,
        "Hidden states",
        "free space that saves must leave on every disk, else requests get 507; 0 disables the check",
        "the smaller of 1GiB and 5 % of the file system",
        "SIZE",
        ge=0,
    )
    ttl_seconds: float | None = _option(
        None,
        "Hidden states",
        "lifetime of files from the end of their save, unless the request sets it",
        "never",
        "SECONDS",
        gt=0,
        le=MAX_TTL_SECONDS,
    )
    keep_records: Annotated[float, BeforeValidator(values.duration)] = _option(
        7 * 86400.0,
        "Hidden states",
        "lifetime of records of ended saves, at most a million records: 7d, 12h or seconds",
        "7d",
        "TIME",
        gt=0,
        le=MAX_TTL_SECONDS,
        allow_inf_nan=False,
    )
    umask: Annotated[int | None, BeforeValidator(values.octal)] = _option(
        None, "Hidden states", "umask of files and folders, octal", "the process's", "UMASK", ge=0, le=0o777
    )
    client_path_map: Annotated[tuple[tuple[str, str], ...], NoDecode, BeforeValidator(values.path_map)] = _option(
        (), "Hidden states", "clients see folder TO under the name FROM; repeatable", "none", "FROM=TO"
    )

    block_size: Count = _option(None, "Memory and scheduling", "tokens per KV block", "the backend's", "TOKENS", ge=1)
    state_page_size: int = _option(32, "Memory and scheduling", "rows per hidden-state page", metavar="ROWS", ge=1, le=4096)
    kv_cache_tokens: Count = _option(None, "Memory and scheduling", "size of the KV cache in tokens", "auto", "TOKENS", ge=1)
    kv_cache_memory: Size = _option(None, "Memory and scheduling", "size of the KV cache in bytes, instead of tokens", "auto", "SIZE", ge=1)
    snapshot_distance: int = _option(
        1024, "Memory and scheduling", "tokens between snapshots of recurrent layers", metavar="TOKENS", ge=64, multiple_of=64
    )
    recurrent_state_memory: Size = _option(
        None,
        "Memory and scheduling",
        "memory for states of recurrent layers, snapshots included",
        "a quarter of the KV cache's",
        "SIZE",
        ge=1,
    )
    state_cache_memory: Size = _option(None, "Memory and scheduling", "host memory for hidden-state pages", "auto", "SIZE", ge=1)
    prefault_caches: bool = _option(False, "Memory and scheduling", "touch the caches' memory at start, on a CPU")
    prefix_cache: bool = _option(True, "Memory and scheduling", "reuse keys, values and hidden states of shared prefixes")
    max_batch_tokens: Count = _option(None, "Memory and scheduling", "maximum tokens per step", "auto", "TOKENS", ge=1)
    prompt_logprobs_memory: Annotated[int, BeforeValidator(values.size_or_auto)] = _option(
        256 * 2**20, "Memory and scheduling", "host memory for log-probabilities of prompts, over all requests", "256MiB", "SIZE", ge=1
    )
    inter_token_ms: Milliseconds = _option(
        None,
        "Memory and scheduling",
        "time limit of a step while text is being generated, in milliseconds; 0: no limit",
        "150 on a CPU, 50 on a GPU",
        "MS",
        ge=0,
        allow_inf_nan=False,
    )
    max_logprobs: int = _option(
        20, "Memory and scheduling", "maximum log-probabilities per token in a request; -1: no limit", metavar="COUNT", ge=-1
    )
    max_running: int = _option(256, "Memory and scheduling", "maximum number of running requests", metavar="COUNT", ge=1)
    max_queued: int = _option(
        1024, "Memory and scheduling", "maximum number of waiting requests; further ones get 429", metavar="COUNT", ge=1
    )

    log_format: Literal["text", "json"] = _option("text", "Logging", "log format")
    log_level: LogLevel = _option("info", "Logging", "minimum log level")
    log_prompts: bool = _option(False, "Logging", "log the prompts of admitted requests")
    otlp_endpoint: Annotated[str | None, BeforeValidator(values.http_url_or_none)] = _option(
        None, "Logging", "OTLP collector for traces, such as http://127.0.0.1:4318", "OTEL_EXPORTER_OTLP_ENDPOINT", "URL"
    )

    @property
    def config_file(self) -> Path | None:
        """The file that was read for what neither flags nor environment say."""
        file = self.model_config.get("toml_file")
        return file if isinstance(file, Path) else None

    @field_validator("tensor_parallel", "pipeline_parallel")
    @classmethod
    def _single(cls, value: int) -> int:
        if value > 1:
            raise ValueError(f"{value} devices are not supported, only 1")
        return value

    @model_validator(mode="after")
    def _one_cache_size(self) -> Self:
        if self.kv_cache_tokens is not None and self.kv_cache_memory is not None:
            raise ValueError("--kv-cache-tokens and --kv-cache-memory exclude each other")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load_settings(flags: dict[str, Any], config_file: Path | None = None) -> Settings:
    """Settings from flags (those given), environment and file. Raises `BadSettings`."""
    if config_file is not None:
        _check_file(config_file)

    class Configured(Settings):
        model_config = SettingsConfigDict(toml_file=config_file)

    try:
        return Configured(**flags)
    except ValidationError as error:
        raise BadSettings([_line(detail, flags, config_file) for detail in error.errors()]) from None


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadSettings([f"--config {path}: {reason}"]) from None


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def _line(detail: ErrorDetails, flags: dict[str, Any], config_file: Path | None) -> str:
    """One line that names the setting as the operator wrote it."""
    message = detail["msg"].removeprefix("Value error, ")
    if not detail["loc"]:
        return message
    field = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        return f"{field} in {config_file}: there is no such setting"
    if field in flags:
        where = flag_of(field)
    elif ENV_PREFIX + field.upper() in os.environ:
        where = ENV_PREFIX + field.upper()
    else:
        where = f"{field} in {config_file}"
    given = "" if message.startswith(repr(detail["input"])) else f", got {detail['input']!r}"
    return f"{where}: {message[0].lower()}{message[1:]}{given}"


def engine_config(settings: Settings, folder: Path, umask: int) -> EngineConfig:
    """What the engine needs of the settings; `folder` is the resolved model."""
    return EngineConfig(
        model=str(folder),
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        state_page_size=settings.state_page_size,
        kv_cache_tokens=settings.kv_cache_tokens,
        kv_cache_memory=settings.kv_cache_memory,
        snapshot_distance=settings.snapshot_distance,
        recurrent_state_memory=settings.recurrent_state_memory,
        state_cache_memory=settings.state_cache_memory,
        prefault_caches=settings.prefault_caches,
        prefix_cache=settings.prefix_cache,
        max_batch_tokens=settings.max_batch_tokens,
        prompt_logprobs_memory=settings.prompt_logprobs_memory,
        inter_token_ms=settings.inter_token_ms,
        max_running=settings.max_running,
        max_queued=settings.max_queued,
        attention=settings.attention,
        cuda_graphs=settings.cuda_graphs,
        overlap=settings.overlap,
        native_kernels=settings.native_kernels,
        self_check=settings.self_check,
        packed_weights=settings.packed_weights,
        trim_last_layer=settings.trim_last_layer,
        threads=settings.threads,
        durability=settings.durability,
        checksum=settings.checksum,
        umask=umask,
    )
