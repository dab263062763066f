"""A small OpenAI-compatible server: it answers 1, then 2, then 3, whatever it is asked."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(
            {"object": "list", "data": [{"id": "my-model", "object": "model", "created": 0, "owned_by": "me"}]}
        )

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number = 1 + sum(message["role"] == "assistant" for message in request["messages"])
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": str(number)}}
        usage = {"prompt_tokens": 8 * number, "completion_tokens": 1, "total_tokens": 8 * number + 1}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": int(time.time()), "model": "my-model"}
        self._answer(head | {"choices": [choice], "usage": usage})

    def _answer(self, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests' output stays readable."""


@contextlib.contextmanager
def counting_model() -> Iterator[int]:
    """Serve on a free loopback port; yields the port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join(10)
