"""`/docs`: the OpenAPI document as one plain page, without scripts and without anything from another host."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "pre{background:#8882;padding:.7em;overflow-x:auto}h3 code{font-size:1.1em}:root{color-scheme:light dark}"
    "td,th{text-align:left;vertical-align:top;padding-right:1.5em}"
)


def add_page(app: FastAPI) -> None:
    """Serve the page at `/docs`; it needs no key, as `/openapi.json`, of which it is another form."""
    made: list[str] = []

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:  # pyright: ignore[reportUnusedFunction]
        if not made:
            made.append(page(app.openapi()))
        return HTMLResponse(made[0], headers=_HEADERS)


def page(document: dict[str, Any]) -> str:
    """The document as HTML: by tag each call with its words, parameters, examples and errors."""
    title = escape(document["info"]["title"])
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"]
    parts += [f"<h1>{title}</h1>", _words(document["info"]["description"])]
    parts.append("<p>For programs: <a href=/openapi.json>/openapi.json</a></p>")
    for tag in document["tags"]:
        parts += [f"<h2>{escape(tag['name'])}</h2>", _words(tag["description"])]
        for path, calls in document["paths"].items():
            for method, call in calls.items():
                if tag["name"] in call["tags"]:
                    parts.append(_call(method, path, call))
    return "\n".join(parts)


def _call(method: str, path: str, call: dict[str, Any]) -> str:
    parts = [f"<h3><code>{method.upper()} {escape(path)}</code> {escape(call['summary'])}</h3>"]
    parts.append(_words(call.get("description", "")))
    for parameter in call.get("parameters", ()):
        needed = "" if parameter.get("required") else ", optional"
        parts.append(f"<p><code>{escape(parameter['name'])}</code> in {parameter['in']}{needed}</p>")
    if "requestBody" in call:
        parts += ["<p>Request</p>", _example(call["requestBody"])]
    errors: list[str] = []
    for status, answer in call["responses"].items():
        if status.startswith("2"):
            parts += [f"<p>{status}</p>", _example(answer)]
        else:
            errors.append(f"<tr><td>{status}<td>{escape(answer['description'])}")
    return "\n".join([*parts, "<details><summary>Errors</summary><table>", *errors, "</table></details>"])


def _example(holder: dict[str, Any]) -> str:
    ((_, content),) = holder["content"].items()
    example = content.get("example")
    text = example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)
    return f"<pre>{escape(text)}</pre>"


def _words(text: str) -> str:
    return "".join(f"<p>{escape(part)}</p>" for part in text.split("\n\n") if part)
