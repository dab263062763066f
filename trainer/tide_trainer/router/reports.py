"""`POST /footprints`: what loops with engines of their own tell of their tasks' contexts.

    report -> known session? -> newer than the last? -> router measures? -> `footprint` event -> answered
                 | no               | no: stale            | yes: superseded, only its growth counts
                 +-> refused                               +- hold -> `call` -> grant -> `passed` -> answered

A report is taken if its sequence is above the session's last one; sessions are one attempt's, so an older attempt or a
sender that is gone cannot speak for it. Once a call of the session went through the router, the router's own measure
counts. A held report waits like a call: the scheduler pauses its task if it must, and nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tide_sdk import asgi
from tide_sdk.footprints import Footprint
from tide_trainer.router.calls import Calls, Notify
from tide_trainer.router.control import Control
from tide_trainer.router.openai_wire import ApiError
from tide_trainer.router.state import Flight, Limits, Session

MAX_REPORTS = 4096


class Reports:
    """Takes reports; the sessions hold what was taken."""

    def __init__(self, control: Control, calls: Calls, notify: Notify, limits: Limits) -> None:
        self._control = control
        self._calls = calls
        self._notify = notify
        self._limits = limits

    async def answer(
        self, given: bytes, body: bytes, joined: Callable[[Flight], Awaitable[Any]]
    ) -> dict[str, int | list[dict[str, Any]]]:
        """Take a body of reports; the answer counts `accepted`, `stale` and `superseded` ones and names the `refused`.

        Args:
            given: the Authorization header: the reporters' token, or a session's key, which speaks for that one alone.
            body: a JSON list.
            joined: waits for a flight as long as the client is there.

        Raises:
            ApiError: nobody's token, another's session, no list of footprints; for a held one what its call would get.
        """
        owner = self._owner(given)
        data = asgi.parse_json(body)
        if not isinstance(data, list) or len(data) > MAX_REPORTS:
            raise ApiError(400, "invalid_value", f"the body must be a list of at most {MAX_REPORTS} footprints")
        reports = [asgi.validate(Footprint, item) for item in data]
        if len(reports) > 1 and any(report.hold for report in reports):
            raise ApiError(400, "invalid_value", "send a report with `hold` in a body of its own", param="hold")
        if owner is not None and any(report.task != owner for report in reports):
            raise ApiError(403, "forbidden", f"this key reports for the session {owner!r} only", param="task")
        counts: dict[str, int] = dict.fromkeys(("accepted", "stale", "superseded"), 0)
        refused: list[dict[str, Any]] = []
        for report in reports:
            verdict = self._take(report)
            if verdict in counts:
                counts[verdict] += 1
            else:
                refused.append({"task": report.task, "sequence": report.sequence, "reason": verdict})
        for name, count in (*counts.items(), ("refused", len(refused))):
            self._control.num_reports[name] += count
        flight = self._flight(reports[0]) if reports and reports[0].hold else None
        if flight is not None:
            await joined(flight)
        return {**counts, "refused": refused}

    def _owner(self, given: bytes) -> str | None:
        """The session whose key was given, None for the reporters' token."""
        token = self._control.reporter_token
        if token and hmac.compare_digest(given, b"Bearer " + token):
            return None
        owner = self._control.session_of(given.removeprefix(b"Bearer "))
        if owner is None:
            words = "send the reporters' token, or the session's api_key, as a bearer token"
            raise ApiError(401, "invalid_api_key", words)
        return owner

    def _take(self, report: Footprint) -> str:
        """What becomes of a report: accepted, stale, superseded, or why it is refused."""
        session = self._control.sessions.get(report.task)
        if session is None:
            if report.hold and self._control.ended(report.task):
                raise ApiError(410, "session_ended", "the session has ended")
            return "the session has ended" if self._control.ended(report.task) else "no such session"
        most = session.max_context_tokens
        if max(report.prompt_tokens + report.completion_tokens, report.context_tokens) > most:
            return f"more tokens than the context's {most}"
        known = session.reported
        if known is not None and report.sequence <= known.sequence:
            return "stale"
        session.reported = report
        session.used_s = time.monotonic()
        measured = session.num_calls > 0
        growth = report.growth_tokens
        footprint = report.model_dump(exclude={"hold"}) | {
            "growth_tokens": None if growth is None else min(growth, most - report.context_tokens)
        }
        self._notify("footprint", {"session": session.name, "superseded": measured, "footprint": footprint})
        return "superseded" if measured else "accepted"

    def _flight(self, report: Footprint) -> Flight | None:
        """The wait of a held report, begun with it or joined by its repetition; None where nothing holds it."""
        session = self._control.sessions.get(report.task)
        if session is None or session.reported is None or report.sequence > session.reported.sequence:
            return None  # refused
        if session.num_calls or session.passed >= report.sequence:
            return None
        key = b"report %d" % report.sequence
        flight = session.flights.get(key)
        if flight is None:
            if len(session.flights) >= self._limits.max_waiting_calls:
                words = f"{self._limits.max_waiting_calls} calls of this session are in flight; wait for one"
                raise ApiError(429, "rate_limit_exceeded", words, kind="rate_limit_error")
            flight = session.flights[key] = Flight(asyncio.create_task(self._pass(session, report.sequence)))
            flight.task.add_done_callback(lambda _: session.flights.pop(key, None))
        return flight

    async def _pass(self, session: Session, sequence: int) -> None:
        """Hold the loop, as a call is held, until the main process lets its task go on."""
        async with session.lock:
            if session.num_calls or session.reported is None or session.passed >= sequence:
                return  # the router measures the session meanwhile, or a newer report has passed
            call, context_tokens = self._calls.number(), max(1, session.reported.context_tokens)
            about: dict[str, Any] = {"session": session.name, "call": call, "context_tokens": context_tokens}
            most = min(session.sampling.max_new_tokens, max(1, session.max_context_tokens - context_tokens))
            try:
                await self._calls.hold(session, call, context_tokens, most)
            except asyncio.CancelledError:
                self._notify("call_cancelled", about | {"rank": None})
                raise
            except ApiError as error:
                if error.code == "hold_timeout":
                    self._calls.failed(about, None, error.code, error.message, retrying=False)
                raise
            session.passed = max(session.passed, sequence)
            # A newer report may have come while this one waited.
            self._notify("passed", about | {"context_tokens": max(1, session.reported.context_tokens)})
