"""The command line."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.errors import ConfigError
from service.config.flags import add_settings
from service.config.settings import ENV_PREFIX, BadSettings, load_settings
from service.config.version import strata_version

USAGE_ERROR = 2
COMPILED_SHAPES = 64
SPINS = 10_000
"""About a tenth of a millisecond."""
HELP_POSITION = 36
HELP_WIDTH = 132


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
        "serve": ("run the service", serve_command),
        "demo": ("start the service, save the hidden states of one completion, show the file", demo_command),
        "inspect": ("show the contents of a file of hidden states", inspect_command),
        "verify": ("check files of hidden states", verify_command),
        "hash-key": ("generate or hash an API key for --api-keys-file", hash_key_command),
        "models": ("list the models in the cache", models_command),
        "openapi": ("print the OpenAPI description of the HTTP API", openapi_command),
        "version": ("print the version", version_command),
    }
    parser = argparse.ArgumentParser(prog="strata", description="Runs a language model and writes its hidden states to files.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, _) in commands.items():
        subparsers.add_parser(name, help=text, add_help=False)
    command = parser.parse_args(arguments[:1]).command
    try:
        return commands[command][1](arguments[1:])
    except BadSettings as error:
        return _print_error(error.lines)
    except ConfigError as error:
        return _print_error([str(error)])


def _print_error(lines: Sequence[str]) -> int:
    for line in lines:
        print(f"strata: {line}", file=sys.stderr)
    return USAGE_ERROR


def _parser(command: str, text: str) -> argparse.ArgumentParser:
    def formatter(prog: str) -> argparse.HelpFormatter:
        return argparse.HelpFormatter(prog, max_help_position=HELP_POSITION, width=HELP_WIDTH)

    return argparse.ArgumentParser(prog=f"strata {command}", description=text, formatter_class=formatter, allow_abbrev=False)


def serve_command(argv: Sequence[str]) -> int:
    parser = _parser("serve", "Runs the service.")
    parser.usage = "strata serve [--model MODEL] [--config FILE] [OPTION ...]"
    parser.epilog = (
        f"Every option is also an environment variable: --max-running is {ENV_PREFIX}MAX_RUNNING. Flags override it; it overrides the file."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings, named like the flags with _ instead of -")
    add_settings(parser)
    given = vars(parser.parse_args(_joined_layers(argv)))
    config_file = given.pop("config")
    settings = load_settings(given, config_file)
    _bound_shape_caches()
    _bound_spinning()
    # Imported here, so that help and errors are printed before torch is loaded.
    from service.http.server import serve
    from service.observe.logs import configure_logging

    configure_logging(settings.log_format, settings.log_level)
    return serve(settings)


def _bound_shape_caches() -> None:
    """PyTorch keeps what oneDNN compiled for a product's shape, for 1,024 shapes in each of two layers: half a gigabyte where the
    rows of a step vary and products are in bfloat16. Must be called before torch is loaded."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(COMPILED_SHAPES))


def _bound_spinning() -> None:
    """GNU's OpenMP has compute threads spin for milliseconds before they sleep. Where another process has the core of the one that they
    wait for, that is how long every operation takes; the pauses within a step are a hundred times shorter. Must be called before torch is
    loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))


def _joined_layers(argv: Sequence[str]) -> list[str]:
    """`--layers -1,norm` as `--layers=-1,norm`: argparse takes a value that begins with a dash for another flag."""
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] == "--layers":
            joined[-1] = f"--layers={argument}"
        else:
            joined.append(argument)
    return joined


def demo_command(argv: Sequence[str]) -> int:
    from service.cli.demo import run_demo

    return run_demo(argv)


def inspect_command(argv: Sequence[str]) -> int:
    from service.cli.files import inspect_files

    parser = _parser("inspect", "Shows the contents of files of hidden states.")
    parser.add_argument("path", nargs="+", type=Path, help="safetensors file")
    return inspect_files(parser.parse_args(argv).path)


def verify_command(argv: Sequence[str]) -> int:
    from service.cli.files import verify_files

    parser = _parser("verify", "Checks files of hidden states: structure, finite values, checksum of the tokens, and their records.")
    parser.add_argument("path", nargs="+", type=Path, help="safetensors file")
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="folder of the registry with the files' records (default: that of `strata serve`)"
    )
    arguments = parser.parse_args(argv)
    state_directory = arguments.state_dir or load_settings({}, None).state_dir
    return verify_files(arguments.path, state_directory, registry_expected=arguments.state_dir is not None)


def hash_key_command(argv: Sequence[str]) -> int:
    from service.http.auth import hashed_line, new_key

    parser = _parser(
        "hash-key", "Generates an API key: prints its line for --api-keys-file on standard output, and the key once on standard error."
    )
    parser.add_argument("--name", help="owner of the key; keys of one name see the same saves")
    parser.add_argument("--stdin", action="store_true", help="hash the key on standard input instead of generating one")
    arguments = parser.parse_args(argv)
    key = sys.stdin.read().strip() if arguments.stdin else new_key()
    print(hashed_line(key, arguments.name))
    if not arguments.stdin:
        print(f"The key, which is not stored: {key}", file=sys.stderr)
    return 0


def models_command(argv: Sequence[str]) -> int:
    from service.config.settings import load_settings

    _parser("models", "Lists the models that have been prepared in the state directory.").parse_args(argv)
    cache = load_settings({}, None).state_dir / "models"
    folders = sorted(path.parent for path in cache.glob("*/config.json"))
    print("\n".join(str(folder) for folder in folders) if folders else f"no models in {cache}")
    return 0


def openapi_command(argv: Sequence[str]) -> int:
    from service.cli.openapi import openapi_yaml

    parser = _parser("openapi", "Prints the description of the HTTP API (OpenAPI 3.1, YAML).")
    parser.parse_args(argv)
    print(openapi_yaml(), end="")
    return 0


def version_command(argv: Sequence[str]) -> int:
    _parser("version", "Prints the version.").parse_args(argv)
    print(f"strata {strata_version()}")
    return 0
