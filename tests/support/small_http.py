"""Answers `GET /health` as the contract says: `python small_http.py HOST WHERE [CAPACITY [child]]`.

WHERE is a port, or a file to announce the URL in; with `child` it also starts a process in a session of its own.
Standard library only, so that it starts fast.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
from pathlib import Path


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        health = {"contract": 1, "environment": "small", "capacity": 8, "tasks": 0}
        body = json.dumps(health | {"incarnation": str(os.getpid())}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    host, where = sys.argv[1:3]
    if sys.argv[4:] == ["child"]:
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    server = http.server.ThreadingHTTPServer((host, int(where) if where.isdigit() else 0), Handler)
    if not where.isdigit():
        part = Path(where + ".part")
        part.write_text(json.dumps({"url": f"http://{host}:{server.server_port}"}))
        part.rename(where)
    server.serve_forever()


if __name__ == "__main__":
    main()
