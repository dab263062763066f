"""The results for people (a table), for programs (JSON), and for CI (JUnit XML)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from tide_sdk import codec
from tide_sdk.check.case import Result

_MARKS = {"pass": "pass", "fail": "FAIL", "skip": "skip"}
_COLOURS = {"pass": "\x1b[32m", "fail": "\x1b[31m", "skip": "\x1b[33m"}
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


HEAD = f"{'':<4}  {'check':<21}  detail"
"""The table's first line."""


def row(result: Result, colour: bool) -> str:
    """One line of the table, and below it what a failed check heard last."""
    mark = _MARKS[result.result]
    if colour:
        mark = f"{_COLOURS[result.result]}{mark}\x1b[0m"
    case = result.case
    detail = _plain(result.detail).replace("\n", " ")
    line = f"{mark}  {case.name:<21}  {detail or case.says}"
    if result.result != "fail":
        return line
    exchanges = "\n".join(exchange for exchange in result.exchanges)
    told = [f"the contract says ({case.section}): {case.says}", *_plain(exchanges).splitlines()]
    return "\n".join([line, *(f"        {words}" for words in told)])


def summary(results: Sequence[Result]) -> str:
    """The last line."""
    counts = {kind: sum(result.result == kind for result in results) for kind in ("pass", "fail", "skip")}
    took_s = sum(result.took_s for result in results)
    return f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped in {took_s:.1f} s"


def write_json(path: Path, url: str, results: Sequence[Result]) -> None:
    """Write the results as JSON.

    Raises:
        OSError: the file cannot be written.
    """
    checks = [
        {
            "id": result.case.name,
            "section": result.case.section,
            "says": result.case.says,
            "result": result.result,
            "detail": _sendable(result.detail),
            "exchanges": [_sendable(exchange) for exchange in result.exchanges],
            "took_s": round(result.took_s, 3),
        }
        for result in results
    ]
    path.write_bytes(codec.dumps({"url": url, "checks": checks}) + b"\n")


def write_junit(path: Path, results: Sequence[Result]) -> None:
    """Write the results as JUnit XML, one test case a check.

    Raises:
        OSError: the file cannot be written.
    """
    counts = {kind: sum(result.result == kind for result in results) for kind in ("fail", "skip")}
    took_s = sum(result.took_s for result in results)
    head = f'tests="{len(results)}" failures="{counts["fail"]}" errors="0" skipped="{counts["skip"]}"'
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuites {head} time="{took_s:.3f}">',
        f'<testsuite name="tide-env check" {head} time="{took_s:.3f}">',
        *(_junit_case(result) for result in results),
        "</testsuite>",
        "</testsuites>",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _junit_case(result: Result) -> str:
    case = result.case
    group, _, name = case.name.partition(".")
    head = f"<testcase classname={_attribute(group)} name={_attribute(name)}" + f' time="{result.took_s:.3f}">'
    if result.result == "skip":
        return f"{head}<skipped message={_attribute(result.detail)}/></testcase>"
    if result.result == "fail":
        told = "\n".join([f"{case.section}: {case.says}", *result.exchanges])
        return f"{head}<failure message={_attribute(result.detail)}>{escape(_xml(told))}</failure></testcase>"
    return f"{head}</testcase>"


def _attribute(text: str) -> str:
    return quoteattr(_xml(text))


def _xml(text: str) -> str:
    """The text with what XML cannot hold, control characters above all, told as escapes."""
    return _NO_XML.sub(_escaped, text)


def _plain(text: str) -> str:
    """The text with what would move a terminal's cursor told as escapes."""
    return _sendable(_CONTROL.sub(_escaped, text))


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
