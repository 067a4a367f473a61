"""Command-line flags out of the fields of `Settings`."""

import argparse
from typing import Any, Literal, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from service.config.settings import Settings, flag_of


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One flag per setting, in groups, each with its default. Values are checked by `Settings`, not by argparse."""
    groups: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        extra = cast(dict[str, str], field.json_schema_extra)
        if extra["group"] not in groups:
            groups[extra["group"]] = parser.add_argument_group(extra["group"])
        default = extra["shown"] or {"True": "on", "False": "off"}.get(str(field.default), str(field.default))
        text = f"{field.description} (default: {default})".replace("%", "%%")
        groups[extra["group"]].add_argument(
            flag_of(name), dest=name, default=argparse.SUPPRESS, help=text, **_form(field, extra["metavar"])
        )


def _form(field: FieldInfo, metavar: str) -> dict[str, Any]:
    if field.annotation is bool:
        return {"action": argparse.BooleanOptionalAction} if field.default else {"action": "store_true"}
    repeatable = {"action": "append"} if get_origin(field.annotation) is tuple else {}
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return {"metavar": metavar or "|".join(choices), **repeatable}
