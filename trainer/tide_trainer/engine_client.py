"""The client of one rollout engine, as the router uses it for every turn: lean, no torch, no vllm.

The engine's HTTP surface is described in `tide_trainer.backends.engine_app`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from tide_sdk import codec, http
from tide_trainer import types
from tide_trainer.errors import EngineFailed, EngineRefused, WeightsDiffer

_ABORT_TIMEOUT_S = 2.0
_MAX_ID = 2**31 - 1
_ReadT = TypeVar("_ReadT")
_REASONS = frozenset({"invalid", "unauthorized", "duplicate", "busy", "updating", "no_weights", "not_newer"})


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """What an engine says of itself.

    Attributes:
        version: model version that it holds.
        serving: False while no proven weights are loaded.
        kv_tokens: KV cache capacity in tokens.
        block_tokens: tokens per KV block.
        max_context_tokens: longest prompt plus completion.
        detail: why it does not serve, empty while it does.
    """

    version: int
    serving: bool
    kv_tokens: int
    block_tokens: int
    max_context_tokens: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What an engine holds at one moment.

    Attributes:
        stats: its live numbers.
        requests: request id -> (computed tokens, KV blocks held); None where it cannot tell.
    """

    stats: types.EngineStats
    requests: Mapping[str, tuple[int, int]] | None


class EngineClient:
    """Calls one engine server; belongs to the event loop that first uses it.

    Args:
        url: the engine's base URL.
        token: bearer token of the engine, None where it has none.
        max_in_flight: calls at once; more wait in order.
        timeout_s: deadline of one call in seconds, waiting included.
    """

    def __init__(
        self, url: str, *, token: str | None = None, max_in_flight: int = 256, timeout_s: float = 120.0
    ) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {token}"} if token else None
        self._http = http.LeanClient(url, max_in_flight=max_in_flight, timeout_s=timeout_s, headers=headers)
        # Health, stats and aborts must pass while every generation slot is taken.
        self._control = http.LeanClient(url, max_in_flight=4, timeout_s=timeout_s, headers=headers)
        self._aborts: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: types.Sampling,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        images: Sequence[types.ImageSpan] = (),
    ) -> types.Completion:
        """Samples one completion; a cancelled or late call is also aborted in the engine.

        Args:
            prompt_ids: [T] token ids, T at least 1.
            sampling: how to sample.
            request_id: unique among the calls in flight; made up if None.
            priority: lower is served first.
            timeout_s: deadline of this call in seconds.
            images: the prompt's, in order; their files are in the run's image store.

        Raises:
            EngineFailed: the engine is gone, broken or late.
            EngineRefused: it is up and does not take this call; `reason` says why.
        """
        request_id = request_id or secrets.token_hex(8)
        asked: dict[str, Any] = {
            "request_id": request_id,
            "prompt_ids": prompt_ids if isinstance(prompt_ids, (list, tuple)) else list(prompt_ids),
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "priority": priority,
        }
        if images:
            asked["images"] = [(span.start, span.num_tokens, span.digest) for span in images]
        body = codec.dumps(asked)
        try:
            response = await self._http.request("POST", "/tide/generate", body, timeout_s=timeout_s)
        except http.ConnectFailed as error:
            raise EngineFailed(f"engine {self.url}: {error}") from error
        except http.TransportError as error:
            self._abort_later(request_id)
            raise EngineFailed(f"engine {self.url}: {error}") from error
        except asyncio.CancelledError:
            self._abort_later(request_id)
            raise
        if response.status != 200:
            self._fail(response)
        return _completion(response.body, self.url)

    async def update_weights(self, update: types.WeightUpdate, *, timeout_s: float | None = None) -> int:
        """Loads a version in place; returns the number of tensors that the engine read back and found right.

        Raises:
            EngineRefused: the version is not newer, calls are in flight, or the file does not fit the model.
            WeightsDiffer: what the live model holds is not what was published; the engine serves nothing now.
            EngineFailed: the engine is gone, broken or late.
        """
        payload = {"version": update.version, "path": update.path, "checksums": dict(update.checksums)}
        answer = await self._call("POST", "/tide/weights", payload, timeout_s)
        return _read(lambda: int(answer["num_tensors"]), self.url)

    async def stats(self, *, timeout_s: float | None = None) -> types.EngineStats:
        """The engine's live numbers. Raises EngineFailed."""
        answer = await self._call("GET", "/tide/stats", None, timeout_s)
        return _read(lambda: _stats(answer), self.url)

    async def snapshot(self, *, timeout_s: float | None = None) -> EngineSnapshot:
        """The live numbers, and what each request holds, read between two forward passes. Raises EngineFailed."""
        answer = await self._call("GET", "/tide/stats?requests=1", None, timeout_s)
        return _read(lambda: EngineSnapshot(_stats(answer), _requests(answer["requests"])), self.url)

    async def health(self, *, timeout_s: float | None = None) -> EngineHealth:
        """Whether and what the engine serves. Raises EngineFailed if it does not answer."""
        answer = await self._call("GET", "/health", None, timeout_s)
        names = EngineHealth.__dataclass_fields__
        return _read(lambda: EngineHealth(**{name: answer[name] for name in names if name in answer}), self.url)

    async def abort(self, request_ids: Sequence[str], *, timeout_s: float | None = None) -> int:
        """Ends calls in flight (they answer with finish reason `abort`); unknown ids are ignored; the number ended."""
        answer = await self._call("POST", "/tide/abort", {"request_ids": list(request_ids)}, timeout_s)
        return _read(lambda: int(answer["num_aborted"]), self.url)

    async def aclose(self) -> None:
        """Closes all connections; calls in flight fail. Safe to repeat."""
        for task in self._aborts:
            task.cancel()
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self._http.aclose()
        await self._control.aclose()

    async def _call(self, method: str, path: str, payload: Any, timeout_s: float | None) -> dict[str, Any]:
        body = None if payload is None else codec.dumps(payload)
        try:
            response = await self._control.request(method, path, body, timeout_s=timeout_s, idempotent=method == "GET")
        except http.TransportError as error:
            raise EngineFailed(f"engine {self.url}: {error}") from error
        if response.status != 200:
            self._fail(response)
        try:
            answer = codec.loads(response.body)
        except codec.CodecError as error:
            raise EngineFailed(f"engine {self.url} answered {method} {path} with nonsense: {error}") from error
        if not isinstance(answer, dict):
            raise EngineFailed(f"engine {self.url} answered {method} {path} with no JSON object")
        return answer

    def _abort_later(self, request_id: str) -> None:
        task = asyncio.create_task(self._abort_quietly(request_id), name=f"abort {request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_quietly(self, request_id: str) -> None:
        try:
            await self.abort([request_id], timeout_s=_ABORT_TIMEOUT_S)
        except (EngineFailed, EngineRefused):
            return  # the caller has its own error; a gone engine generates nothing any more

    def _fail(self, response: http.Response) -> NoReturn:
        try:
            problem = codec.loads(response.body)
        except codec.CodecError:
            problem = None
        problem = problem if isinstance(problem, dict) else {}
        detail = str(problem.get("detail") or f"HTTP {response.status}")
        reason = str(problem.get("reason", ""))
        message = f"engine {self.url}: {detail}"
        if reason == "weights_differ":
            raise WeightsDiffer(message)
        if reason in _REASONS:
            raise EngineRefused(message, reason=reason)
        raise EngineFailed(message)


def _stats(answer: dict[str, Any]) -> types.EngineStats:
    return types.EngineStats(**{name: int(answer[name]) for name in types.EngineStats.__dataclass_fields__})


def _requests(listed: Any) -> dict[str, tuple[int, int]] | None:
    if listed is None:
        return None
    return {str(name): (int(tokens), int(blocks)) for name, (tokens, blocks) in listed.items()}


def _completion(body: bytes, url: str) -> types.Completion:
    try:
        answer = codec.loads(body)
    except codec.CodecError as error:
        raise EngineFailed(f"engine {url} answered a generation with nonsense: {error}") from error
    return _read(lambda: _checked(answer), url)


def _checked(answer: Any) -> types.Completion:
    token_ids, logprobs = tuple(answer["token_ids"]), tuple(answer["logprobs"])
    # `set(map(type, ...))` checks the types at C speed: this is on the way of every turn.
    if set(map(type, token_ids)) - {int} or set(map(type, logprobs)) - {float, int}:
        raise ValueError("token_ids must be whole numbers, logprobs numbers")
    if len(token_ids) != len(logprobs) or (token_ids and not 0 <= min(token_ids) <= max(token_ids) <= _MAX_ID):
        raise ValueError(f"{len(token_ids)} ids and {len(logprobs)} log-probs, or an id that is none")
    return types.Completion(
        token_ids, logprobs, int(answer["cached_tokens"]), str(answer["finish_reason"]), int(answer["version"])
    )


def _read(read: Callable[[], _ReadT], url: str) -> _ReadT:
    """What `read` makes of an answer. Raises EngineFailed if the answer does not have the form."""
    try:
        return read()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineFailed(f"engine {url} answered with nonsense: {type(error).__name__}: {error}") from error
