"""Answers `GET /health` as the contract says, on `--port N` or `--uds PATH`; standard library only, so that hundreds
start in seconds."""

import argparse
import json
import os
import signal
import socket
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--uds")
parser.add_argument("--port", type=int)
parser.add_argument("--told", default="")
arguments = parser.parse_args()


def stop(*_) -> None:
    if arguments.told:
        with open(arguments.told, "w") as file:
            file.write("told to stop")
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
if arguments.uds:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(arguments.uds)
else:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", arguments.port))
listener.listen(64)
health = {"contract": 1, "environment": "small", "capacity": 8, "tasks": 0, "incarnation": os.urandom(8).hex()}
body = json.dumps(health).encode()
while True:
    connection = listener.accept()[0]
    connection.settimeout(5)
    try:
        while connection.recv(65536):
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            break
    except OSError:
        pass
    connection.close()
