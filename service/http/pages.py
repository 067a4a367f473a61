"""The HTML of the front page, made of what the service knows. Everything that is not written here is escaped."""

from collections.abc import Iterator
from html import escape

from service.schemas.answers import Front

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


def page_headers(**sources: str) -> dict[str, str]:
    """Headers of a page that loads no more than it says: `style="'self'"` lets it have styles of this service."""
    allowed = "".join(f"{kind}-src {source}; " for kind, source in sources.items())
    others = "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return {
        "Content-Security-Policy": f"default-src 'none'; {allowed}{others}",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def front_page(known: Front, url: str) -> str:
    """What is served, whether it is well, and where to go on. `url` is where the service is, with a slash behind."""
    healthy = "ok" if known.status == "ok" else "bad"
    parts = [
        f"<h1>Strata</h1><p class=soft>{ABOUT}</p>",
        f'<p>This service is <span class="status {healthy}">{escape(STATUS_TEXT[known.status])}</span>'
        f" <span class=soft>(version {escape(known.version)})</span></p>",
    ]
    if known.model is not None:
        parts.append(f"<h2>Model</h2>{_rows((name, _code(value)) for name, value in known.model.items())}")
        layer = known.model["default layers"][-1]
        parts.append(f"<h2>Try it</h2><pre>{escape(EXAMPLE.format(url=url, layer=layer))}</pre>")
    # Relative, so that they hold behind a proxy that puts the service below a path of its own.
    links = " ".join(f'<a href="{escape(target.removeprefix("/"))}">{escape(name)}</a>' for name, target in known.links.items())
    parts.append(f"<h2>Go on</h2><nav>{links}</nav>")
    return _page("Strata", "".join(parts))


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel=icon href="data:,"><style>{STYLE}</style></head><body>{body}</body></html>\n'
    )


def _rows(rows: Iterator[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th scope=row>{escape(name)}</th><td>{text}</td></tr>" for name, text in rows) + "</table>"


def _code(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"<code>{escape(text)}</code>"
