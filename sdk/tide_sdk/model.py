"""The model that an agent talks to: any OpenAI-compatible server, or the trainer's router."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import urlsplit

from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.http_connection import ConnectFailed, ProtocolFailed, QueueFull, TransportError
from tide_sdk.http_parse import Response
from tide_sdk.https import HttpClient, open_client
from tide_sdk.images import ImageRef
from tide_sdk.model_errors import ModelRefused, failure_of, parse_body
from tide_sdk.retries import Backoff

IMAGE_LIMIT_S = 120.0
"""Deadline for giving the server an image."""
_RETRIED_STATUS = frozenset({429, 503})


class ModelEndpoint:
    """Where and how to ask for the next message; the connections are shared by all endpoints made by `at`.

    A try whose answer was lost is not made again, because sampling is an action; a server that says it is busy
    (429, 503) or cannot be reached is asked again until the deadline.

    Args:
        base_url: the OpenAI base URL, for example `http://127.0.0.1:8000/v1`.
        model: the model's name there.
        api_key: sent as `Authorization: Bearer`, never logged.
        sampling: defaults of every call, for example `{"temperature": 1.0, "max_tokens": 64}`.
        timeout_s: deadline of a call; long, because a scheduler may hold it back.
        max_in_flight: calls at once.
        image_references: the server takes references to images that were put there (`put_image`), as a trainer's router
            does; every other gets the images themselves.
        http: another transport to the URL's host, for tests.
        sleep: waits that many seconds.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        api_key: str = "",
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float = 3600.0,
        max_in_flight: int = 1024,
        image_references: bool = False,
        http: HttpClient | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.api_key = api_key
        self.model = model
        self.sampling = dict(sampling or {})
        self.image_references = image_references
        self._timeout_s = timeout_s
        self._origin, self._path = _split(self.base_url)
        self._http = http or open_client(self._origin, max_in_flight=max_in_flight, timeout_s=timeout_s)
        self._sleep = sleep
        self._backoff = Backoff()

    def at(self, *, base_url: str | None = None, api_key: str | None = None) -> ModelEndpoint:
        """The same endpoint for one task's own URL or key, on the same host and connections.

        Raises:
            ValueError: the URL is on another host.
        """
        url = (base_url or self.base_url).rstrip("/")
        if _split(url)[0] != self._origin:
            raise ValueError(f"{url!r} is not on {self._origin}")
        return ModelEndpoint(
            url,
            model=self.model,
            api_key=self.api_key if api_key is None else api_key,
            sampling=self.sampling,
            timeout_s=self._timeout_s,
            image_references=self.image_references,
            http=self._http,
            sleep=self._sleep,
        )

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **sampling: Any
    ) -> dict[str, Any]:
        """Ask for one chat completion: the whole answer, with `choices` and `usage`.

        Raises:
            ContextOverflow: the server says, by a code or in words, that the messages do not fit its context.
            ModelRefused: a content filter held the request back.
            ModelStopped: 410.
            RequestInvalid: 400, 413 or 422 for another reason.
            TransportError: no answer, or the server failed.
            TideError: `unauthorized`, the server refuses the key.
        """
        payload: dict[str, Any] = {"model": self.model, "messages": list(messages)}
        if tools:
            payload["tools"] = list(tools)
        body = codec.dumps(payload | self.sampling | sampling)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._ask("POST", f"{self._path}/chat/completions", body, {})
        except TimeoutError as error:
            raise TransportError(f"{self.base_url}: no completion within {self._timeout_s} s") from error
        return _read(response)

    async def put_image(self, ref: ImageRef, data: bytes) -> None:
        """Give the server an image, which messages may then refer to; safe to repeat.

        Raises:
            ModelStopped: 410.
            RequestInvalid: it does not take this image, or none.
            TransportError: no answer, or the server failed.
        """
        headers = {"Content-Type": ref.media_type}
        path = f"{self._path}/images/{ref.digest}"
        try:
            async with asyncio.timeout(IMAGE_LIMIT_S):
                response = await self._ask("PUT", path, data, headers, idempotent=True)
        except TimeoutError as error:
            raise TransportError(f"{self.base_url}: an image was not taken within {IMAGE_LIMIT_S} s") from error
        _read(response)

    async def models(self, *, timeout_s: float = 10.0) -> list[str]:
        """The names that the server lists at `/models`; none where it lists none.

        Raises:
            TideError: the server refuses the key.
            TransportError: no answer.
        """
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else None
        response = await self._http.request(
            "GET", f"{self._path}/models", headers=headers, timeout_s=timeout_s, idempotent=True
        )
        if response.status == 401:
            raise TideError("unauthorized", "the model's server refuses the key")
        try:
            listed: Any = codec.loads(response.body)["data"] if response.status == 200 else []
            return [str(one["id"]) for one in cast("list[dict[str, Any]]", listed)]
        except (codec.CodecError, KeyError, TypeError):
            return []

    async def aclose(self) -> None:
        """Close the shared connections; safe to repeat."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _ask(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], *, idempotent: bool = False
    ) -> Response:
        sent = {**headers, "Authorization": f"Bearer {self.api_key}"} if self.api_key else headers
        num_failures = 0
        while True:
            try:
                response = await self._http.request(
                    method, path, body, headers=sent, timeout_s=self._timeout_s, idempotent=idempotent
                )
                if response.status not in _RETRIED_STATUS:
                    return response
            except TransportError as error:
                # What was lost on its way may have been sampled.
                if num_failures >= 8 or not (idempotent or isinstance(error, (ConnectFailed, QueueFull))):
                    raise
            num_failures += 1
            await self._sleep(self._backoff.wait_s(num_failures, random.random()))  # noqa: S311 (spreads callers)


def first_message(completion: Mapping[str, Any]) -> dict[str, Any]:
    """The assistant message of a completion, without empty fields.

    Raises:
        ModelRefused: the model declined.
        ProtocolFailed: there is no message, or none that has the types of OpenAI's.
    """
    try:
        choice = completion["choices"][0]
        raw = cast("dict[str, Any]", choice["message"])
        message = {name: value for name, value in raw.items() if value is not None and value != []}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ProtocolFailed("the completion holds no choices[0].message") from error
    if message.get("refusal") or choice.get("finish_reason") == "content_filter":
        raise ModelRefused(str(message.get("refusal") or "the answer was held back by a content filter"))
    if "content" not in message and "tool_calls" not in message:
        message["content"] = ""
    calls = message.get("tool_calls", [])
    objects = isinstance(calls, list) and all(isinstance(call, dict) for call in cast("list[Any]", calls))
    if not isinstance(message.get("content", ""), (str, list)) or not objects:
        raise ProtocolFailed("the completion's message has content that is no text, or tool_calls that are no calls")
    return message | {"role": "assistant"}


def _read(response: Response) -> dict[str, Any]:
    if response.status >= 400:
        raise failure_of(response.status, parse_body(response.body))
    try:
        data = codec.loads(response.body)
    except codec.CodecError:
        data = None
    if not isinstance(data, dict):
        raise ProtocolFailed("the completion is not a JSON object")
    answer = cast("dict[str, Any]", data)
    if answer.get("error") and not answer.get("choices"):  # proxies answer 200 where the server behind them failed
        raise failure_of(_status_within(answer["error"]), answer)
    return answer


def _status_within(error: Any) -> int:
    """The HTTP status that an error names as its code; 500 where it names none."""
    code: Any = cast("dict[str, Any]", error).get("code") if isinstance(error, dict) else None
    return code if type(code) is int and 400 <= code < 600 else 500


def _split(url: str) -> tuple[str, str]:
    """(scheme and host, path) of a URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query:
        raise ValueError(f"{url!r}: expected http://host:port/v1 or https://host/v1")
    return f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
