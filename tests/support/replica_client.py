"""Calls gateways as a good client does: the same body again, at another replica, until there is an answer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tide_sdk import codec
from tide_sdk.http import ConnectFailed, DeadlineExceeded, Disconnected, LeanClient, Response, TransportError
from tide_sdk.retries import Backoff

WAITABLE = {"unavailable": "unavailable", "capacity": "capacity", "paused": "paused"}
CAUSES = {ConnectFailed: "connect", Disconnected: "disconnected", DeadlineExceeded: "timeout"}


class Refused(Exception):
    """A gateway refused for good.

    Attributes:
        status: the HTTP status.
        problem: the body.
    """

    def __init__(self, call: str, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.code = str(problem.get("code", ""))
        self.problem = dict(problem)
        super().__init__(f"{call}: HTTP {status} {self.code}: {problem.get('detail', '')}")


class NoAnswer(Exception):
    """No replica gave an answer within the call's deadline; the message has the last failure."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: the parsed body, the number of tries that it took, and the replica that gave it."""

    data: dict[str, Any]
    num_tries: int
    replica: int


class ReplicaClient:
    """One client per replica; each call goes to one of them by chance, and each repetition to another one.

    Args:
        urls: the replicas.
        token: sent with each call.
        max_in_flight: calls at once to each replica; more wait in order.
        try_s: deadline of one try; the answer of a turn that takes longer is joined again.
        deadline_s: deadline of a call with all its tries.
        rng: draws replicas and jitter.
        retries: counts on in it; a new counter by default.

    Attributes:
        retries: repetitions so far, by cause.
        num_replicas: how many there are.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        max_in_flight: int = 256,
        try_s: float = 30.0,
        deadline_s: float = 120.0,
        rng: random.Random | None = None,
        retries: Counter[str] | None = None,
    ) -> None:
        headers = {"Tide-Contract": "1"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._clients = [LeanClient(url, max_in_flight=max_in_flight, timeout_s=try_s, headers=headers) for url in urls]
        self.num_replicas = len(urls)
        self._try_s = try_s
        self._deadline_s = deadline_s
        self._backoff = Backoff(first_s=0.05, max_s=2.0)
        self._rng = rng or random.Random(0)
        self.retries = Counter[str]() if retries is None else retries

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(client.aclose() for client in self._clients))

    def other(self, replica: int) -> int:
        """Another replica, by chance; the same one where there is only one."""
        others = [number for number in range(len(self._clients)) if number != replica]
        return self._rng.choice(others) if others else replica

    async def post(self, path: str, payload: Mapping[str, Any], replica: int | None = None) -> Answer:
        """`POST`, repeated with the same body until there is an answer.

        Raises:
            Refused: an error that a repetition does not mend.
            NoAnswer: the deadline is over.
        """
        return await self._call("POST", path, codec.dumps(dict(payload)), replica)

    async def get(self, path: str, replica: int | None = None) -> Answer:
        """`GET`, repeated until there is an answer; raises as `post` does."""
        return await self._call("GET", path, None, replica)

    async def _call(self, method: str, path: str, body: bytes | None, replica: int | None) -> Answer:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._deadline_s
        number = self._rng.randrange(len(self._clients)) if replica is None else replica
        num_tries = 0
        while True:
            num_tries += 1
            asked_s: float | None = None
            try:
                timeout_s = max(0.01, min(self._try_s, end_s - loop.time()))
                response = await self._clients[number].request(method, path, body, timeout_s=timeout_s, idempotent=True)
            except TransportError as error:
                cause, last = CAUSES.get(type(error), "protocol"), str(error)
            else:
                cause, last = self._cause(f"{method} {path}", response)
                if not cause:
                    return Answer(_parse(response), num_tries, number)
                asked_s = _retry_after_s(response)
            wait_s = self._backoff.wait_s(num_tries, self._rng.random(), asked_s)
            if loop.time() + wait_s >= end_s:
                raise NoAnswer(f"{method} {path}: no answer in {self._deadline_s:g} s, {num_tries} tries; last: {last}")
            self.retries[cause] += 1
            await asyncio.sleep(wait_s)
            number = self.other(number)

    def _cause(self, call: str, response: Response) -> tuple[str, str]:
        """Why the call is repeated, with the words of the answer; ("", "") where it is an answer."""
        if response.status < 400:
            return "", ""
        problem = _parse(response)
        code = str(problem.get("code", ""))
        if code in WAITABLE:
            return WAITABLE[code], f"HTTP {response.status} {code}: {problem.get('detail', '')}"
        raise Refused(call, response.status, problem)


def _parse(response: Response) -> dict[str, Any]:
    try:
        data = codec.loads(response.body)
    except codec.CodecError:
        data = None
    return data if isinstance(data, dict) else {"detail": response.body[:300].decode("utf-8", "replace")}


def _retry_after_s(response: Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) < 4 else None
