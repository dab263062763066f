"""Servers of images without a network: a gateway's blobs, and a model's server that may take images."""

from __future__ import annotations

from tide_sdk import codec
from tide_sdk.http import Disconnected
from tide_sdk.http_parse import Response


class Blobs:
    """A gateway that answers `GET /blobs/` as scripted: bytes, an exception or a problem; the last one for ever."""

    def __init__(self, *script) -> None:
        self.script, self.paths = list(script), []

    async def request(self, method, path, body=None, *, headers=None, timeout_s=None, idempotent=False):
        self.paths.append(path)
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, bytes):
            return Response(200, {"content-type": "image/png"}, answer)
        return Response(answer[0], {}, codec.dumps(answer[1]))

    async def aclose(self):
        pass


class FakeServer:
    """A model server that takes chats, and images where a router would."""

    def __init__(self) -> None:
        self.chats: list[list[dict]] = []
        self.images: dict[str, bytes] = {}
        self.puts: list[str] = []
        self.lose = 0

    async def request(self, method, path, body=None, *, headers=None, timeout_s=None, idempotent=False):
        assert headers["Authorization"] == "Bearer key"
        if method == "PUT":
            self.puts.append(path)
            assert headers["Content-Type"] == "image/png"
            self.images[path.rpartition("/")[2]] = body
            if self.lose:
                self.lose -= 1
                raise Disconnected("the answer was lost")
            return Response(200, {}, b"{}")
        self.chats.append(codec.loads(body)["messages"])
        return Response(200, {}, codec.dumps({"choices": [{"message": {"content": "click"}, "finish_reason": "stop"}]}))

    async def aclose(self):
        pass
