"""Command-line flags out of the fields of `Settings`."""

import argparse
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from service.config.settings import Settings, flag_of

REPEATABLE = frozenset({"save_root", "client_path_map", "cors_origin"})


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One flag per setting, in groups, each with its default. Values are checked by `Settings`, not by argparse."""
    groups: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        extra = cast(dict[str, str], field.json_schema_extra)
        group = groups.setdefault(extra["group"], None) or parser.add_argument_group(extra["group"])
        groups[extra["group"]] = group
        group.add_argument(
            flag_of(name), dest=name, default=argparse.SUPPRESS, help=_help(field, extra["shown"]), **_form(name, field, extra)
        )


def given_settings(arguments: argparse.Namespace) -> tuple[dict[str, Any], Path | None]:
    """The settings that were given as flags, and the file of the others."""
    given = vars(arguments)
    return {name: value for name, value in given.items() if name != "config"}, given["config"]


def _form(name: str, field: FieldInfo, extra: dict[str, str]) -> dict[str, Any]:
    if field.annotation is bool:
        return {"action": argparse.BooleanOptionalAction} if field.default else {"action": "store_true"}
    choices = _choices(field.annotation)
    metavar = extra["metavar"] or "|".join(choices)
    return {"action": "append", "metavar": metavar} if name in REPEATABLE else {"metavar": metavar}


def _choices(annotation: Any) -> tuple[str, ...]:  # noqa: ANN401 - any annotation
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return next((found for part in get_args(annotation) if (found := _choices(part))), ())
    return ()


def _help(field: FieldInfo, shown: str) -> str:
    default = shown or ("on" if field.default is True else "off" if field.default is False else str(field.default))
    return f"{field.description} (default: {default})".replace("%", "%%")
