"""A call's way: planned, held until the main process grants a rank, generated, captured, answered.

    plan -> call event -> [held] -> grant -> engine of the rank -> capture -> turn event -> answer
               ^                                |
               +---- call_failed event <--------+  rank lost or refusing: asked again, at most twice;
                                                   aborted by the main process: asked again, and again held

A held call waits for the main process's `grant` or `refuse`, bounded by `hold_timeout_s`; a granted one for the engine,
bounded by `engine_timeout_s`. Every call that was announced ends with exactly one of the events `turn`, `call_failed`,
`call_cancelled` (unless the main process refused it), so the main process can count granted calls without asking.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

from tide_trainer import types
from tide_trainer.channel import PeerError
from tide_trainer.errors import EngineFailed, EngineRefused, WeightsDiffer
from tide_trainer.images import ImageStore
from tide_trainer.router.generations import CallAborted, Engine, Generations
from tide_trainer.router.openai_wire import Answer, ApiError, ChatRequest, CompletionRequest, now_s
from tide_trainer.router.planning import plan_call
from tide_trainer.router.renderer import Renderer
from tide_trainer.router.replies import Reply, read_reply
from tide_trainer.router.run_images import RunImages
from tide_trainer.router.sessions import PlannedTurn
from tide_trainer.router.state import Grant, Limits, Session

_LOG = logging.getLogger(__name__)
MAX_ATTEMPTS = 3
MAX_PLANNED_BYTES = 131_072
"""A longer request is planned in a thread: its encoding may take a second, in which no other session would go on."""
_REFUSED_STATUS = {
    "context_length_exceeded": 400,
    "rate_limit_exceeded": 429,
    "session_ended": 410,
    "session_closed": 410,
}
"""HTTP status of the main process's refusals; any other code is 503."""
Notify = Callable[[str, dict[str, Any]], None]


class Calls:
    """Runs calls; holds no opinion on when."""

    def __init__(
        self, renderer: Renderer, notify: Notify, limits: Limits, model: str, image_store: ImageStore | None = None
    ) -> None:
        self.images = RunImages(renderer.images, image_store)
        self._renderer = renderer
        self._notify = notify
        self._limits = limits
        self._model = model
        self._ids = itertools.count(1)
        self._held: dict[str, asyncio.Future[Grant]] = {}
        self.ranks: dict[str, Engine] = {}
        self.generations = Generations()
        self.closing = False

    @property
    def num_held(self) -> int:
        """Calls that wait for a grant."""
        return len(self._held)

    def grant(self, call: str, grant: Grant) -> None:
        """Release a held call; with an unknown rank it fails and is asked again. Raises PeerError `unknown_call`."""
        self._take(call).set_result(grant)

    def refuse(self, call: str, code: str, message: str) -> None:
        """Answer a held call with an error. Raises PeerError `unknown_call`."""
        status = _REFUSED_STATUS.get(code, 503)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self._take(call).set_exception(ApiError(status, code, message, kind=kind))

    async def run(self, session: Session, request: ChatRequest | CompletionRequest, num_bytes: int) -> Answer:
        """One call from its arrival to its answer, in the session's order.

        Args:
            session: whose call it is.
            request: what is asked.
            num_bytes: of the request's body.

        Raises:
            ApiError: every failure, ready to be answered.
        """
        async with session.lock:
            session.used_s = time.monotonic()
            if isinstance(request, ChatRequest):
                request = await self.images.referred(session.capture.images, request)
            if num_bytes > MAX_PLANNED_BYTES:  # the lock keeps the capture as it is meanwhile
                about = (session, request, self._renderer, self._limits)
                turn, sampling = await asyncio.to_thread(plan_call, *about)
            else:
                turn, sampling = plan_call(session, request, self._renderer, self._limits)
            attempt = 0
            while attempt < MAX_ATTEMPTS:
                number = self.number()
                try:
                    reply = await self._attempt(session, turn, sampling, request.stop, number, attempt)
                except CallAborted:
                    continue  # no rank has failed: the main process will grant another one
                if reply is not None:
                    return self._answer(session, turn, number, *reply, request.token_ids)
                attempt += 1
            raise ApiError(
                503, "engine_unavailable", f"{MAX_ATTEMPTS} ranks failed or refused this call", kind="server_error"
            )

    def number(self) -> str:
        """A new call's number."""
        return str(next(self._ids))

    async def hold(
        self, session: Session, call: str, prompt_tokens: int, max_new_tokens: int, attempt: int = 0
    ) -> Grant:
        """Announce a call and wait for its grant. Raises ApiError where it is refused or waits too long."""
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._held[call] = future
        try:
            event = {
                "session": session.name,
                "call": call,
                "turn": session.num_calls,
                "attempt": attempt,
                "prompt_tokens": prompt_tokens,
                "max_new_tokens": max_new_tokens,
            }
            self._notify("call", event)
            async with asyncio.timeout(self._limits.hold_timeout_s):
                return await future
        except TimeoutError:
            message = f"no rank was granted within {self._limits.hold_timeout_s:g} s"
            raise ApiError(503, "hold_timeout", message, kind="server_error") from None
        finally:
            self._held.pop(call, None)

    def failed(self, about: dict[str, Any], grant: Grant | None, code: str, message: str, *, retrying: bool) -> None:
        """Tell the main process that an announced call has failed."""
        _LOG.warning("call %s of %s failed: %s: %s", about["call"], about["session"], code, message)
        rank = grant.rank if grant is not None else None
        self._notify("call_failed", about | {"rank": rank, "code": code, "message": message, "retrying": retrying})

    async def close(self) -> None:
        """Close the engines' clients."""
        await self.generations.close()
        await asyncio.gather(*(engine.aclose() for engine in self.ranks.values()))
        self.ranks.clear()

    async def _attempt(
        self,
        session: Session,
        turn: PlannedTurn,
        sampling: types.Sampling,
        stop: tuple[str, ...],
        number: str,
        attempt: int,
    ) -> tuple[Reply, types.Completion, Grant, float] | None:
        """The reply, or None if another attempt may help."""
        about: dict[str, Any] = {"session": session.name, "call": number}
        grant: Grant | None = None
        try:
            grant = await self.hold(session, number, len(turn.prompt_ids), sampling.max_new_tokens, attempt)
            started_s = time.perf_counter()
            completion = await self.generations.run(
                self.ranks[grant.rank],
                number,
                turn.prompt_ids,
                sampling,
                priority=grant.priority,
                timeout_s=self._limits.engine_timeout_s,
                images=turn.images,
            )
            try:
                session.capture.images.check_sampled(completion.token_ids)
                reply = read_reply(self._renderer, turn.expected, completion, stop)
            except ValueError as error:
                raise EngineFailed(str(error)) from error
            return reply, completion, grant, time.perf_counter() - started_s
        except asyncio.CancelledError:
            self._notify("call_cancelled", about | {"rank": grant and grant.rank})
            raise
        except ApiError as error:
            if error.code == "hold_timeout":
                self.failed(about, grant, error.code, error.message, retrying=False)
            raise
        except CallAborted as error:
            self.failed(about | {"dropped_tokens": error.dropped_tokens}, grant, "aborted", str(error), retrying=True)
            raise
        except (EngineFailed, EngineRefused, WeightsDiffer, KeyError) as error:
            hopeless = isinstance(error, EngineRefused) and error.reason == "invalid"
            retrying = not hopeless and attempt + 1 < MAX_ATTEMPTS
            self.failed(about, grant, "engine_failed", f"{type(error).__name__}: {error}", retrying=retrying)
            if hopeless:
                raise ApiError(503, "engine_refused", str(error), kind="server_error") from error
            return None
        except Exception as error:
            self.failed(about, grant, "internal", f"{type(error).__name__}: {error}", retrying=False)
            raise

    def _answer(
        self,
        session: Session,
        turn: PlannedTurn,
        number: str,
        reply: Reply,
        completion: types.Completion,
        grant: Grant,
        engine_s: float,
        token_ids: bool,
    ) -> Answer:
        version = completion.version if completion.version >= 0 else grant.version
        session.capture.commit(turn, reply, version)
        index = session.num_calls
        session.num_calls += 1
        session.used_s = time.monotonic()
        prompt_tokens, completion_tokens = len(turn.prompt_ids), len(reply.token_ids)
        session.prompt_tokens += prompt_tokens
        session.cached_tokens += completion.cached_tokens
        session.completion_tokens += completion_tokens
        final_tokens, context_tokens = grant.final_tokens, prompt_tokens + completion_tokens
        footprint = {
            "task": session.name,
            "sequence": index + 1,
            "turn": index,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "cached_tokens": min(completion.cached_tokens, prompt_tokens),
            "image_tokens": sum(span.num_tokens for span in turn.images),
            "context_tokens": context_tokens,
            "growth_tokens": None if final_tokens is None else max(0, final_tokens - context_tokens),
        }
        event = {
            "session": session.name,
            "call": number,
            "footprint": footprint,
            "finish_reason": reply.finish_reason,
            "engine_s": engine_s,
            "rank": grant.rank,
            "version": version,
        }
        self._notify("turn", event)
        return Answer(
            call=number,
            model=self._model,
            created=now_s(),
            message=reply.message,
            text=reply.text,
            finish_reason=reply.finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=completion.cached_tokens,
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            prompt_ids=turn.prompt_ids if token_ids else (),
            version=version,
        )

    def _take(self, call: str) -> asyncio.Future[Grant]:
        future = self._held.pop(call, None)
        if future is None or future.done():
            raise PeerError("unknown_call", f"call {call} is not held: answered, refused, cancelled or unknown")
        return future
