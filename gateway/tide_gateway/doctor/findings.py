"""What a check says, and how checks are run: side by side, each bounded, none able to stop another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tide_gateway.scrubbing import scrub

MAX_CHARS = 500


class Level(StrEnum):
    """`ok`; `warn`: it works, but an operator should know; `fail`: it does not, or will not, work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was looked at.
        level: how it stands.
        says: what was found and what that means.
        fix: what to do, "" where nothing is to be done.
    """

    check: str
    level: Level
    says: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at.

    Attributes:
        name: of the findings, where the check itself fails.
        look: finds.
        limit_s: its deadline.
    """

    name: str
    look: Callable[[], Awaitable[Sequence[Finding]]]
    limit_s: float = 15.0


def ok(check: str, says: str) -> Finding:
    """Nothing is to be done."""
    return Finding(check, Level.OK, says)


def warn(check: str, says: str, fix: str = "") -> Finding:
    """It works, but."""
    return Finding(check, Level.WARN, says, fix)


def fail(check: str, says: str, fix: str = "") -> Finding:
    """It does not work."""
    return Finding(check, Level.FAIL, says, fix)


def refused(check: str, error: Exception) -> Finding:
    """What a start would be refused with: most of our errors name the fix behind the last semicolon."""
    says, _, fix = str(error).rpartition("; ")
    return Finding(check, Level.FAIL, says, fix) if says else Finding(check, Level.FAIL, fix, "correct that")


async def run_checks(checks: Sequence[Check]) -> list[Finding]:
    """The findings of all checks, in their order; one that breaks or takes too long is a finding itself."""
    found = await asyncio.gather(*(_run(check) for check in checks))
    return [_clean(finding) for findings in found for finding in findings]


async def _run(check: Check) -> Sequence[Finding]:
    try:
        async with asyncio.timeout(check.limit_s):
            return await check.look()
    except TimeoutError:
        return [fail(check.name, f"no answer within {check.limit_s:g} s", "find out what hangs, and look again")]
    except Exception as error:  # noqa: BLE001 (one that breaks must not hide what the others found)
        words = f"it could not be looked at: {type(error).__name__}: {error}"
        return [fail(check.name, words, "this is a fault of the doctor's own unless the words say more")]


def _clean(finding: Finding) -> Finding:
    """In one line, bounded, without secrets: libraries' and strangers' words are among them."""

    def line(text: str) -> str:
        whole = " ".join("".join(sign if sign.isprintable() else " " for sign in scrub(text)).split())
        return whole if len(whole) <= MAX_CHARS else whole[:MAX_CHARS] + "..."

    return Finding(finding.check, finding.level, line(finding.says), line(finding.fix))
