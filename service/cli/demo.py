"""`strata demo`: starts the service, has one completion's hidden states saved, shows the file, stops the service."""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from engine.errors import ConfigError
from engine.models.checkpoints.prepared import Progress
from engine.models.checkpoints.source import default_cache, resolve_model
from service.cli.demo_client import RequestFailed, complete, get_json, get_text, wait_for_save
from service.cli.demo_report import completion_lines, file_lines, metric_lines
from service.cli.launcher import LaunchError, ServiceProcess

PROMPT = "The hidden states of a language model are useful because"
METRICS_SHOWN = (
    "strata_requests_total",
    "strata_saves_total",
    "strata_prompt_tokens_total",
    "strata_generated_tokens_total",
    "strata_computed_tokens_total",
    "strata_time_to_first_token_seconds_sum",
    "strata_request_duration_seconds_sum",
    "strata_save_latency_seconds_sum",
    "strata_written_bytes_total",
)


def run_demo(argv: Sequence[str]) -> int:
    """Runs the demonstration; 0 when all of it worked. Options it doesn't know go to `strata serve`."""
    options, serve_arguments = _parse(argv)
    service: ServiceProcess | None = None
    try:
        with _sigterm_as_interrupt(), tempfile.TemporaryDirectory(prefix="strata-demo-") as state_dir:
            service = _service(options, serve_arguments, state_dir)
            _print_line("Starting the service")
            with service:
                _demonstrate(service, options)
                service.stop()
            _print_line("\nThe service has ended; nothing is left running.")
    except KeyboardInterrupt:
        _print_line("\nInterrupted; the service has been stopped.")
        return 1
    except (ConfigError, LaunchError, RequestFailed, OSError) as error:
        _print_error(error, service)
        return 1
    return 0


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="strata demo",
        description="Starts the service on a free port, saves the hidden states of one completion, shows the file and stops the service.",
        epilog="Any other option is passed on to `strata serve`, for example --model or --dtype.",
        allow_abbrev=False,
    )
    parser.add_argument("--prompt", default=PROMPT, help="text that the model continues")
    parser.add_argument("--max-tokens", type=int, default=48, help="number of tokens to generate (default: %(default)s)")
    parser.add_argument("--save-root", type=Path, default=Path("saves/demo"), help="folder for the file (default: %(default)s)")
    return parser.parse_known_args(argv)


def _service(options: argparse.Namespace, serve_arguments: Sequence[str], state_dir: str) -> ServiceProcess:
    # Defaults first, so that what the user says stands. The model is prepared here, where it is kept for later services: the
    # demonstration's own state directory goes with it.
    arguments = ["--port", "0", "--state-dir", state_dir, "--save-root", str(options.save_root), *serve_arguments]
    if not any(argument.split("=")[0] == "--model" for argument in serve_arguments):
        source = resolve_model(None, cache=default_cache(), progress=Progress(lambda line: _print_line(f"  | {line}")))
        arguments = ["--model", str(source.folder), "--served-model-name", source.name, *arguments]
    return ServiceProcess(arguments, on_line=lambda line: _print_line(f"  | {line}"))


def _demonstrate(service: ServiceProcess, options: argparse.Namespace) -> None:
    model = get_json(f"{service.url}/v1/models")["data"][0]["id"]
    _print_line(f"\nAsking {model} for {options.max_tokens} tokens, with the hidden states of the default layers\n")
    completion = complete(service.url, _body(model, options))
    record = wait_for_save(service.url, completion.save_id)
    _print_lines(completion_lines(options.prompt, completion, record))
    _print_line("")
    _print_lines(file_lines(Path(record["hidden_states_path"])))
    _print_line("Metrics (a few of those at /metrics)")
    _print_lines(metric_lines(get_text(f"{service.url}/metrics"), METRICS_SHOWN))


def _body(model: str, options: argparse.Namespace) -> dict[str, Any]:
    save = {"hidden_states_path": "demo.safetensors", "on_conflict": "replace", "include_output_tokens": True, "wait": False}
    return {
        "model": model,
        "prompt": options.prompt,
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "kv_transfer_params": save,
    }


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A polite end asked of this process must end the service too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _print_error(error: Exception, service: ServiceProcess | None) -> None:
    print(f"\nerror: {error}", file=sys.stderr)
    if service is not None and not isinstance(error, LaunchError) and service.tail():
        print(f"the service's last lines were:\n{service.tail()}", file=sys.stderr)


def _print_line(line: str) -> None:
    print(line, flush=True)


def _print_lines(lines: Iterator[str]) -> None:
    for line in lines:
        _print_line(line)
