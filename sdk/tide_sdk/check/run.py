"""Runs checks one after the other, each with a deadline, and ends what each leaves open."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

from tide_sdk.check import (
    cases_ends,
    cases_errors,
    cases_http,
    cases_kills,
    cases_load,
    cases_messages,
    cases_pauses,
    cases_starts,
    cases_turns,
)
from tide_sdk.check.case import Case, Failed, Plan, Result, Skipped
from tide_sdk.check.subject import Subject
from tide_sdk.check.talk import Talk

ALL: tuple[Case, ...] = (
    *cases_http.CASES,
    *cases_errors.CASES,
    *cases_starts.CASES,
    *cases_turns.CASES,
    *cases_messages.CASES,
    *cases_pauses.CASES,
    *cases_ends.CASES,
    *cases_load.CASES,
    *cases_kills.CASES,
)
"""In the order in which they run: those that end the server come last."""


def select(names: Sequence[str]) -> tuple[Case, ...]:
    """The checks with these ids, or whose ids begin with `NAME.`; all where none is named.

    Raises:
        ValueError: a name that fits none.
    """
    if not names:
        return ALL
    for name in names:
        if not any(_fits(case, name) for case in ALL):
            known = ", ".join(dict.fromkeys(case.name.partition(".")[0] for case in ALL))
            raise ValueError(f"--only {name}: no such check; there are {known}, and --list shows each")
    return tuple(case for case in ALL if any(_fits(case, name) for name in names))


async def run_checks(
    subject: Subject, plan: Plan, cases: Sequence[Case], limit_s: float, on_result: Callable[[Result], None]
) -> list[Result]:
    """Run the checks on an open subject.

    Args:
        subject: the server.
        plan: how its environment is driven.
        cases: the checks.
        limit_s: for all of them together; those that are left then fail.
        on_result: called with each result as it comes.
    """
    run_id = secrets.token_hex(4)
    deadline_s = time.monotonic() + limit_s
    results: list[Result] = []
    for case in cases:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            result = Result(case, "fail", f"not made: the time for all checks, {limit_s:g} s, is over", (), 0.0)
        else:
            talk = Talk(subject, plan, f"check/{run_id}/{case.name}")
            result = await _run(case, talk, min(plan.timeout_s, left_s))
        results.append(result)
        on_result(result)
    return results


async def _run(case: Case, talk: Talk, limit_s: float) -> Result:
    begun_s = time.monotonic()
    failure = ""
    skipped = ""
    try:
        async with asyncio.timeout(limit_s):
            await case.run(talk)
    except Skipped as reason:
        skipped = str(reason)
    except Failed as error:
        failure = str(error)
    except TimeoutError:
        failure = f"not over within {limit_s:g} s"
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        failure = f"an answer lacks what the check looks for: {type(error).__name__}: {error}"
    exchanges = talk.exchanges
    try:
        async with asyncio.timeout(limit_s):
            await talk.clean_up()
    except (Failed, TimeoutError) as error:
        failure = failure or f"a task of the check could not be ended: {error or 'no answer'}"
        exchanges = exchanges or talk.exchanges
    took_s = time.monotonic() - begun_s
    if failure:
        return Result(case, "fail", failure, exchanges, took_s)
    if skipped:
        return Result(case, "skip", skipped, (), took_s)
    return Result(case, "pass", "; ".join(talk.notes), (), took_s)


def _fits(case: Case, name: str) -> bool:
    return case.name == name or case.name.startswith(f"{name}.")
