"""The client of a gateway, or of an environment server, which speaks the same contract."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Self, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, RootModel, ValidationError

from tide_sdk import codec
from tide_sdk.asgi import validate
from tide_sdk.clocks import ClockName
from tide_sdk.errors import TideError
from tide_sdk.http import read_json
from tide_sdk.http_connection import ProtocolFailed, TransportError
from tide_sdk.http_parse import Response
from tide_sdk.https import HttpClient, open_client
from tide_sdk.image_cache import ImageCache, blob_reader
from tide_sdk.retries import Backoff, asked_s, may_retry, place_wait_s
from tide_sdk.wire import (
    CONTRACT_HEADER,
    CONTRACT_VERSION,
    IMAGES_HEADER,
    CapacityView,
    EndResponse,
    EpochResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    Message,
    ObservationResponse,
    StartRequest,
    StartResponse,
    TaskView,
    Wire,
)

M = TypeVar("M", bound=BaseModel)


class GatewayClient:
    """Async client of the contract's endpoints; one for a whole process.

    A failed call is made again only where that cannot act twice: the contract answers a repeated `/start` (by its
    key), `/observation` (by its turn), `/end`, and `/pause` or `/resume` with an epoch as it answered the first one.
    While a task is paused `observe` waits; it never resumes a task by itself.

    Args:
        url: `http://`, `https://` or `unix:/path`.
        token: sent as `Authorization: Bearer`, never logged.
        timeout_s: deadline of one try; an environment that takes longer is joined again by the next.
        deadline_s: deadline of a whole call with all its tries and waits.
        max_in_flight: calls at once; further ones wait in order.
        references: images of observations come as references; `blob` reads them, and keeps `cache_bytes` in memory.
        backoff: the waits between tries.
        http: another transport, for tests; the client closes it.
        now: a monotonic clock in seconds.
        sleep: waits that many seconds.
        jitter: draws a number from 0 to 1.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        deadline_s: float = 900.0,
        max_in_flight: int = 1024,
        references: bool = False,
        cache_bytes: int = 64 * 1024 * 1024,
        backoff: Backoff | None = None,
        http: HttpClient | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        headers = {CONTRACT_HEADER: str(CONTRACT_VERSION)}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        if references:
            headers[IMAGES_HEADER] = "reference"
        self.url = url
        self.references = references
        self._images = ImageCache(cache_bytes)
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._backoff = backoff or Backoff()
        self._http = http or open_client(url, max_in_flight=max_in_flight, timeout_s=timeout_s, headers=headers)
        self._now, self._sleep, self._jitter = now, sleep, jitter

    async def start(
        self,
        environment: str,
        key: str,
        *,
        task: Mapping[str, Any] | None = None,
        seed: int | None = None,
        split: str | None = None,
        kind: Literal["train", "eval"] = "train",
        limits: Mapping[ClockName, float] | None = None,
        attempt: int = 0,
        deadline_s: float | None = None,
        waits_for_place: bool = True,
    ) -> StartResponse:
        """Start a task, or get the first answer again for a key that has started; waits for capacity.

        Raises:
            TideError: the server refused; where no place is free and it must not wait for one, `capacity` at once.
            TransportError: no answer within the deadline.
        """
        given = {"environment": environment, "key": key, "seed": seed, "split": split, "kind": kind, "attempt": attempt}
        bodies = {"task": None if task is None else dict(task), "limits": None if limits is None else dict(limits)}
        body = codec.dumps(validate(StartRequest, given | bodies).model_dump(mode="json", exclude_none=True))
        data = await self._call("POST", "/start", body, idempotent=True, deadline_s=deadline_s, waits=waits_for_place)
        return self._read(StartResponse, data)

    async def observe(
        self, task_id: str, turn: int, message: Message | Mapping[str, Any], *, deadline_s: float | None = None
    ) -> ObservationResponse:
        """Take the action of `turn`; safe to call again with the same message, also from another process.

        Raises:
            TideError: the server refused; 409, 410 and 422 at once.
            TransportError: no answer within the deadline.
        """
        plain = message.as_dict() if isinstance(message, Message) else message
        payload = {"task_id": task_id, "turn": turn, "message": plain}
        return await self._post(ObservationResponse, "/observation", payload, deadline_s=deadline_s)

    async def observation(self, task_id: str) -> ObservationResponse:
        """The latest observation again, without any effect.

        Raises:
            TideError: the server refused.
            TransportError: no answer within the deadline.
        """
        return self._read(ObservationResponse, await self.get(f"/observation?task_id={quote(task_id, safe='')}"))

    async def pause(self, task_id: str, epoch: int | None = None) -> EpochResponse:
        """Stop the task's clocks; without `epoch` a lost answer is not tried again.

        Raises:
            TideError: the server refused.
            TransportError: no answer.
        """
        return await self._epoch("/pause", task_id, epoch)

    async def resume(self, task_id: str, epoch: int | None = None) -> EpochResponse:
        """Let the task's clocks go on; without `epoch` a lost answer is not tried again.

        Raises:
            TideError: the server refused.
            TransportError: no answer.
        """
        return await self._epoch("/resume", task_id, epoch)

    async def end(self, task_id: str, reason: str | None = None, *, deadline_s: float | None = None) -> EndResponse:
        """End the task in whatever state it is and get its account; safe to repeat.

        Raises:
            TideError: the server refused.
            TransportError: no answer within the deadline.
        """
        payload = {"task_id": task_id} | ({} if reason is None else {"reason": reason[:1024]})
        return await self._post(EndResponse, "/end", payload, deadline_s=deadline_s)

    async def tasks(self) -> list[TaskView]:
        """All of the caller's tasks, newest first, page by page."""
        found: list[TaskView] = []
        after = ""
        while True:
            page = self._read(_TaskPage, await self.get(f"/tasks?limit=500{after}"))
            found += page.tasks
            if page.next is None:
                return found
            after = f"&after={quote(page.next, safe='')}"

    async def task(self, task_id: str) -> TaskView:
        """One task."""
        return self._read(TaskView, await self.get(f"/tasks/{quote(task_id, safe='')}"))

    async def environments(self) -> Any:
        """What the gateway can start, as it says it."""
        return await self.get("/environments")

    async def capacity(self, *, deadline_s: float | None = None) -> dict[str, CapacityView]:
        """What each environment can start for the caller now, by its name."""
        return self._read(_Capacities, await self.get("/capacity", deadline_s=deadline_s)).root

    async def heartbeat(
        self, prefix: str, timeout_s: float | None, *, deadline_s: float | None = None
    ) -> HeartbeatResponse:
        """Promise the next heartbeat for the tasks whose key begins with `prefix` within `timeout_s`; safe to repeat.

        If it does not come the gateway ends those tasks; with None the promise is withdrawn. Cancelling leaves the
        promise either as it was or as asked for.

        Raises:
            TideError: the server refused.
            TransportError: no answer within the deadline.
        """
        request = validate(HeartbeatRequest, {"prefix": prefix, "timeout_s": timeout_s})
        return await self._post(HeartbeatResponse, "/heartbeat", request.model_dump(mode="json"), deadline_s=deadline_s)

    async def healthz(self) -> Any:
        """Whether the gateway serves, as it says it."""
        return await self.get("/healthz")

    async def get(self, path: str, *, deadline_s: float | None = None) -> Any:
        """The parsed answer of any GET endpoint.

        Raises:
            TideError: the server refused.
            TransportError: no answer within the deadline.
        """
        return await self._call("GET", path, None, idempotent=True, deadline_s=deadline_s)

    async def blob(self, digest: str, *, deadline_s: float | None = None) -> bytes:
        """The bytes of an image by the digest in its reference; they have that SHA-256.

        Raises:
            TideError: the server refused; `not_found` where no task of the caller shows it.
            TransportError: no answer within the deadline, or other bytes each time.
        """
        data = self._images.get(digest)
        if data is None:
            path, read = f"/blobs/{digest}", blob_reader(digest)
            data = await self._call("GET", path, None, idempotent=True, deadline_s=deadline_s, read=read)
            self._images.put(digest, data)
        return data

    async def aclose(self) -> None:
        """Close all connections; safe to repeat."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _epoch(self, path: str, task_id: str, epoch: int | None) -> EpochResponse:
        payload: dict[str, Any] = {"task_id": task_id} | ({} if epoch is None else {"epoch": epoch})
        return await self._post(EpochResponse, path, payload, idempotent=epoch is not None)

    async def _post(
        self, model: type[M], path: str, payload: Any, *, idempotent: bool = True, deadline_s: float | None = None
    ) -> M:
        data = await self._call("POST", path, codec.dumps(payload), idempotent=idempotent, deadline_s=deadline_s)
        return self._read(model, data)

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        idempotent: bool,
        deadline_s: float | None,
        read: Callable[[Response], Any] = read_json,
        waits: bool = True,
    ) -> Any:
        end_s = self._now() + (self._deadline_s if deadline_s is None else deadline_s)
        num_failures = 0
        while True:
            timeout_s = max(0.001, min(self._timeout_s, end_s - self._now()))
            response: Response | None = None
            try:
                response = await self._http.request(method, path, body, timeout_s=timeout_s, idempotent=idempotent)
                return read(response)
            except (TransportError, TideError) as error:
                num_failures += 1
                if not may_retry(error, idempotent=idempotent, waits_for_place=waits):
                    raise
                wait_s = place_wait_s(error, self._jitter())
                if wait_s is None:
                    wait_s = self._backoff.wait_s(num_failures, self._jitter(), asked_s(response))
                if self._now() + wait_s >= end_s:
                    error.add_note(f"given up after {num_failures} tries of {method} {path}")
                    raise
            await self._sleep(wait_s)

    def _read(self, model: type[M], data: Any) -> M:
        try:
            return model.model_validate(data)
        except ValidationError as error:
            raise ProtocolFailed(f"{self.url} answered outside the contract: {error}") from error


class _TaskPage(Wire):
    tasks: list[TaskView]
    next: str | None = None


_Capacities = RootModel[dict[str, CapacityView]]
