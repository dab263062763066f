"""The HTTP surface of every rollout engine: a plain ASGI handler over a `ServedEngine`, and the process around it.

    POST /tide/generate  {request_id, prompt_ids, temperature, max_new_tokens, stop_token_ids, priority,
                          images: [[start, num_tokens, digest], ...] where there are any}
                         -> {token_ids, logprobs, cached_tokens, finish_reason, version}
    POST /tide/weights   {version, path, checksums} -> {version, num_tensors}
    POST /tide/abort     {request_ids} -> {num_aborted}
    GET  /tide/stats     -> the fields of `types.EngineStats`; `?requests=1` adds {requests: {id: [tokens, blocks]}},
                            null where they cannot be read
    GET  /metrics        -> the same numbers as Prometheus text, see `engine_metrics`
    GET  /health         -> {version, serving, kv_tokens, block_tokens, max_context_tokens, detail}

Loopback only. `Authorization: Bearer` where a token is configured. Errors are problem+json with a `reason` as in
`errors.EngineRefused`, `weights_differ`, or `failed` when the engine itself broke. Log-probs are those of the sampled
ids under the plain softmax (temperature 1), whatever the temperature. A stop id is part of `token_ids`.

The prompt's ids hold an image's placeholders in full, and the engine computes on exactly these ids: a span that does
not fit its image is refused. Images are read from the run's store, which lies on the same machine. Placeholder ids are
never sampled.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from tide_sdk import codec
from tide_sdk.asgi import WHOLE, Receive, Scope, Send, send_json
from tide_trainer import types
from tide_trainer.backends import engine_metrics
from tide_trainer.engine_client import EngineHealth
from tide_trainer.errors import EngineFailed, EngineRefused, WeightsDiffer

_LOG = logging.getLogger(__name__)
_MAX_BODY_BYTES = 32 * 1024 * 1024
_MAX_STOP_IDS = 64
_STATUS = {"invalid": 422, "unauthorized": 401, "no_weights": 503, "updating": 503, "failed": 500}
_JSON = (b"content-type", b"application/json")
_TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_PROBLEM = (b"content-type", b"application/problem+json")


class ServedEngine(Protocol):
    """What a server process puts behind the HTTP surface."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: types.Sampling,
        priority: int,
        images: Sequence[types.ImageSpan] = (),
    ) -> types.Completion:
        """Samples one completion. Raises EngineRefused or EngineFailed."""
        ...

    async def update_weights(self, update: types.WeightUpdate) -> int:
        """Loads and proves a version; the number of tensors. Raises EngineRefused, WeightsDiffer or EngineFailed."""
        ...

    def abort(self, request_ids: list[str]) -> int:
        """Ends calls in flight; the number ended."""
        ...

    def stats(self) -> types.EngineStats:
        """The live numbers."""
        ...

    async def requests(self) -> dict[str, tuple[int, int]] | None:
        """Request id -> (computed tokens, KV blocks held); None where the engine cannot tell."""
        ...

    def health(self) -> EngineHealth:
        """What it serves now."""
        ...


class EngineApp:
    """The ASGI application of one engine process.

    Args:
        engine: what is served.
        token: bearer token that every call must carry; None for none.
    """

    def __init__(self, engine: ServedEngine, token: str | None) -> None:
        self._engine = engine
        self._expected = f"Bearer {token}".encode() if token else None
        self._routes: dict[tuple[str, str], Callable[[bytes, bytes], Awaitable[dict[str, Any] | str]]] = {
            ("POST", "/tide/generate"): self._generate,
            ("POST", "/tide/weights"): self._weights,
            ("POST", "/tide/abort"): self._abort,
            ("GET", "/tide/stats"): self._stats,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one HTTP request; called by the server."""
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        try:
            self._authorize(scope)
            body = await _read_body(receive)
            route = self._routes.get((scope["method"], scope["path"]))
            if route is None:
                raise EngineRefused(f"no {scope['method']} {scope['path']} here", reason="invalid")
            answer, status = await route(body, scope["query_string"]), 200
            kind = _TEXT if isinstance(answer, str) else _JSON
        except EngineRefused as error:
            answer, status, kind = _problem(error.reason, str(error))
        except WeightsDiffer as error:
            _LOG.error("weights refused: %s", error)
            answer, status, kind = _problem("weights_differ", str(error))
        except EngineFailed as error:
            answer, status, kind = _problem("failed", str(error))
        except Exception as error:  # noqa: BLE001 - the boundary: reported to the caller and logged
            _LOG.exception("the engine broke in %s", scope["path"])
            answer, status, kind = _problem("failed", f"{type(error).__name__}: {error}")
        data = answer.encode() if isinstance(answer, str) else codec.dumps(answer)
        await send_json(send, status, data, (kind,), whole=scope.get(WHOLE))

    def _authorize(self, scope: Scope) -> None:
        if self._expected is None:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self._expected):
            raise EngineRefused("the bearer token is missing or wrong", reason="unauthorized")

    async def _generate(self, body: bytes, _query: bytes) -> dict[str, Any]:
        data = _object(body)
        request_id = _field(data, "request_id", str)
        sampling = types.Sampling(
            temperature=_number(data, "temperature", 0.0, 100.0),
            max_new_tokens=_field(data, "max_new_tokens", int),
            stop_token_ids=tuple(_ids(data, "stop_token_ids", _MAX_STOP_IDS)),
        )
        if sampling.max_new_tokens < 1:
            raise _invalid("max_new_tokens", "must be at least 1")
        health = self._engine.health()
        prompt_ids = _ids(data, "prompt_ids", health.max_context_tokens)
        if not prompt_ids or len(prompt_ids) + sampling.max_new_tokens > health.max_context_tokens:
            raise _invalid(
                "prompt_ids",
                f"{len(prompt_ids)} prompt and {sampling.max_new_tokens} new tokens: give at least one prompt token, "
                f"and together at most max_context_tokens {health.max_context_tokens}",
            )
        if not health.serving:
            raise EngineRefused(health.detail, reason="no_weights")
        priority, images = _field(data, "priority", int), _images(data, len(prompt_ids))
        done = await self._engine.generate(request_id, prompt_ids, sampling, priority, images)
        return {
            "token_ids": done.token_ids,
            "logprobs": done.logprobs,
            "cached_tokens": done.cached_tokens,
            "finish_reason": done.finish_reason,
            "version": done.version,
        }

    async def _weights(self, body: bytes, _query: bytes) -> dict[str, Any]:
        data = _object(body)
        checksums = _field(data, "checksums", dict)
        if not all(isinstance(value, str) for value in checksums.values()):
            raise _invalid("checksums", "must map tensor names to hex digests")
        update = types.WeightUpdate(_field(data, "version", int), _field(data, "path", str), checksums)
        # Once begun, an update runs to its end even if the caller goes: half a model is never served.
        num_tensors = await asyncio.shield(asyncio.ensure_future(self._engine.update_weights(update)))
        return {"version": update.version, "num_tensors": num_tensors}

    async def _abort(self, body: bytes, _query: bytes) -> dict[str, Any]:
        request_ids = _field(_object(body), "request_ids", list)
        if not all(isinstance(request_id, str) for request_id in request_ids):
            raise _invalid("request_ids", "must be strings")
        return {"num_aborted": self._engine.abort(request_ids)}

    async def _stats(self, _body: bytes, query: bytes) -> dict[str, Any]:
        stats = self._engine.stats()
        answer: dict[str, Any] = {name: getattr(stats, name) for name in types.EngineStats.__dataclass_fields__}
        if query == b"requests=1":
            answer["requests"] = await self._engine.requests()
        return answer

    async def _health(self, _body: bytes, _query: bytes) -> dict[str, Any]:
        health = self._engine.health()
        return {name: getattr(health, name) for name in EngineHealth.__dataclass_fields__}

    async def _metrics(self, _body: bytes, _query: bytes) -> str:
        return engine_metrics.prometheus_text(self._engine.stats(), self._engine.health())


async def _read_body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise EngineRefused("the caller went away", reason="invalid")
        body += message.get("body", b"")
        if len(body) > _MAX_BODY_BYTES:
            raise EngineRefused(f"the body is above {_MAX_BODY_BYTES} bytes", reason="invalid")
        if not message.get("more_body", False):
            return body


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = codec.loads(body)
    except codec.CodecError as error:
        raise EngineRefused(f"the body is not JSON: {error}", reason="invalid") from error
    if not isinstance(data, dict):
        raise EngineRefused("the body must be a JSON object", reason="invalid")
    return data


def _field(data: dict[str, Any], name: str, kind: type) -> Any:
    value = data.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _invalid(name, f"must be {kind.__name__}")
    return value


def _number(data: dict[str, Any], name: str, low: float, high: float) -> float:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise _invalid(name, f"must be a number from {low} to {high}")
    return float(value)


def _ids(data: dict[str, Any], name: str, max_num: int) -> list[int]:
    ids = data.get(name)
    if not isinstance(ids, list) or len(ids) > max_num:
        raise _invalid(name, f"must be a list of at most {max_num} token ids")
    # `set(map(type, ...))` checks the types at C speed; a loop would cost more than the rest of the call.
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0):
        raise _invalid(name, "must hold token ids, whole numbers from 0")
    return ids


def _images(data: dict[str, Any], max_num: int) -> tuple[types.ImageSpan, ...]:
    listed = data.get("images", [])
    if not isinstance(listed, list) or len(listed) > max_num:
        raise _invalid("images", "must be a list of [start, num_tokens, digest], at most one for each prompt id")
    for entry in listed:
        if not isinstance(entry, list) or list(map(type, entry)) != [int, int, str]:
            raise _invalid("images", "must hold [start, num_tokens, digest] for each image")
    return tuple(types.ImageSpan(*entry) for entry in listed)


def _invalid(field: str, what: str) -> EngineRefused:
    return EngineRefused(f"{field}: {what}", reason="invalid")


def _problem(reason: str, detail: str) -> tuple[dict[str, Any], int, tuple[bytes, bytes]]:
    status = _STATUS.get(reason, 409)
    return {"title": "The engine refused", "status": status, "reason": reason, "detail": detail}, status, _PROBLEM
