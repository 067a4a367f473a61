"""The HTML of the pages for people, made of what the service knows. Everything that is not written here is escaped."""

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from service.schemas.answers import Front

Json = Mapping[str, Any]

STYLE = """
:root { color-scheme: light dark; --text: #1d2228; --soft: #5b6570; --page: #fbfbfa; --card: #fff; --line: #dfe3e6; --link: #0a58ca;
  --good: #18794e; --bad: #b42318; --code: #f1f3f4 }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8ea; --soft: #9aa5b0; --page: #15181b; --card: #1d2125; --line: #333a41;
  --link: #7ab3ff; --good: #5bc98c; --bad: #ff8a7d; --code: #262b30 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 52rem; padding: 2.5rem 1.25rem; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, sans-serif }
h1 { margin: 0; font-size: 1.7rem } h2 { margin: 2rem 0 .6rem; font-size: 1.1rem } p { margin: .4rem 0 }
a { color: var(--link) } .soft { color: var(--soft) }
code, pre { font: .88em/1.5 ui-monospace, monospace; background: var(--code); border-radius: 4px }
code { padding: .1em .3em; overflow-wrap: anywhere } pre { padding: .8rem 1rem; overflow-x: auto; border: 1px solid var(--line) }
.status { font-weight: 600 } .ok { color: var(--good) } .bad { color: var(--bad) }
table { border-collapse: collapse; width: 100%; background: var(--card); border: 1px solid var(--line) }
th, td { padding: .4rem .8rem; border-top: 1px solid var(--line); text-align: left; vertical-align: top; font-weight: normal }
th { color: var(--soft); white-space: nowrap } tr:first-child > * { border-top: 0 }
nav { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem }
details { margin: .5rem 0; border: 1px solid var(--line); background: var(--card); border-radius: 4px; padding: .5rem .9rem }
summary { cursor: pointer } details table { margin: .6rem 0; font-size: .92em }
"""
STATUS_TEXT = {
    "ok": "ready",
    "starting": "starting: the model is being loaded",
    "draining": "shutting down: running requests finish, new ones are refused",
    "dead": "failed: the engine has stopped, see the log",
    "stopped": "stopped",
}
ABOUT = "Runs a causal language model and writes the hidden states of chosen layers to safetensors files."
EXAMPLE = """\
curl {url}v1/completions -H 'Content-Type: application/json' -d '{{
  "prompt": "The capital of France is", "max_tokens": 8,
  "kv_transfer_params": {{"layers": [{layer}], "include_output_tokens": true}}}}'"""


def front_page(known: Front, url: str) -> str:
    """What is served, whether it is well, and where to go on. `url` is where the service is, with a slash behind."""
    healthy = "ok" if known.status == "ok" else "bad"
    parts = [
        f"<h1>Strata</h1><p class=soft>{ABOUT}</p>",
        f'<p>This service is <span class="status {healthy}">{escape(STATUS_TEXT[known.status])}</span>'
        f" <span class=soft>(version {escape(known.version)})</span></p>",
    ]
    if known.model is not None:
        parts.append(f"<h2>Model</h2>{_rows((name, _shown(value)) for name, value in known.model.items())}")
        layer = known.model["default layers"][-1]
        parts.append(f"<h2>Try it</h2><pre>{escape(EXAMPLE.format(url=url, layer=layer))}</pre>")
    links = " ".join(f'<a href="{escape(target)}">{escape(name)}</a>' for name, target in known.links.items())
    parts.append(f"<h2>Go on</h2><nav>{links}</nav>")
    return _page("Strata", "".join(parts))


def reference_page(document: Json) -> str:
    """The routes and fields of an OpenAPI document, one after the other."""
    schemas = document["components"]["schemas"]
    operations = "".join(
        _operation(method, path, operation, schemas) for path, methods in document["paths"].items() for method, operation in methods.items()
    )
    intro = '<p class=soft>In full, for programs: <a href="/openapi.json">openapi.json</a>. <a href="/">Back</a></p>'
    return _page("Strata: API", f"<h1>API</h1>{intro}{operations}")


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel=icon href="data:,"><style>{STYLE}</style></head><body>{body}</body></html>\n'
    )


def _rows(rows: Iterator[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th scope=row>{escape(name)}</th><td>{text}</td></tr>" for name, text in rows) + "</table>"


def _shown(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"<code>{escape(text)}</code>"


def _operation(method: str, path: str, operation: Json, schemas: Json) -> str:
    description = _prose(operation.get("description", operation.get("summary", "")))
    inputs = [*_parameters(operation), *_fields(operation, schemas)]
    table = f"<table>{''.join(inputs)}</table>" if inputs else ""
    answers = "; ".join(f"<code>{escape(code)}</code> {escape(answer['description'])}" for code, answer in operation["responses"].items())
    head = f"<summary><code>{method.upper()} {escape(path)}</code> {description.partition('. ')[0].rstrip('.')}</summary>"
    return f"<details>{head}<p>{description}</p>{table}<p class=soft>{answers}</p></details>"


def _prose(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _parameters(operation: Json) -> Iterator[str]:
    for parameter in operation.get("parameters", ()):
        yield _field(parameter["name"], parameter["schema"], parameter.get("description", ""))


def _fields(operation: Json, schemas: Json) -> Iterator[str]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None:
        properties = schemas[content["schema"]["$ref"].rpartition("/")[2]]["properties"]
        for name, schema in properties.items():
            yield _field(name, schema, schema.get("description", ""))
            for inner_name, inner in _properties(schema, schemas).items():
                yield _field(f"{name}.{inner_name}", inner, inner.get("description", ""))


def _properties(schema: Json, schemas: Json) -> Json:
    """Those of an object within a body."""
    references = [part["$ref"] for part in (schema, *schema.get("anyOf", ())) if "$ref" in part]
    found: Json = schemas[references[0].rpartition("/")[2]]["properties"] if references else {}
    return found


def _field(name: str, schema: Json, description: str) -> str:
    default = (
        f" <span class=soft>default <code>{escape(repr(schema['default']))}</code></span>" if schema.get("default") is not None else ""
    )
    return f"<tr><th scope=row><code>{escape(name)}</code></th><td>{escape(_type(schema))}{default}</td><td>{_prose(description)}</td></tr>"


def _type(schema: Json) -> str:
    if "anyOf" in schema:
        kinds = dict.fromkeys(_type(part) for part in schema["anyOf"] if part.get("type") != "null")
        return " or ".join(kinds)
    if "$ref" in schema or "allOf" in schema:
        return "object"
    return f"{schema.get('type', 'any')}" if "items" not in schema else f"array of {_type(schema['items'])}"
