"""Log lines, as text for people or as JSON for machines, each with the task or the server that was worked on.

    decide, start -> working_on = the task     keeper -> working_on = the server     request -> its x-request-id
                          |
    a record is written: who is asked what `working_on` is now; nothing is made before

Work that is begun inherits what it is for, as every asyncio task copies the context of whoever made it.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol, TextIO

from tide_gateway.lifecycle import Task
from tide_gateway.scrubbing import ScrubbingFilter, scrub

FORMATS = ("text", "json")
MAX_REQUEST_ID_CHARS = 128


class OnTask(Protocol):
    """What is worked on is a task; `service.live.Live` is one."""

    task: Task


@dataclass(frozen=True, slots=True)
class OnServer:
    """What is worked on is an environment server."""

    environment: str
    instance: str


working_on: contextvars.ContextVar[OnTask | OnServer | None] = contextvars.ContextVar("working_on", default=None)
request_scope: contextvars.ContextVar[MutableMapping[str, Any] | None] = contextvars.ContextVar("scope", default=None)
replica_name: contextvars.ContextVar[str] = contextvars.ContextVar("replica", default="")


def environment_worked_on() -> str:
    """The environment of the task or server that is worked on now, "" where none is."""
    subject = working_on.get()
    if subject is None:
        return ""
    return subject.environment if isinstance(subject, OnServer) else subject.task.environment


def context_fields() -> dict[str, str]:
    """What is worked on now: replica, task_id, environment, instance, owner, request_id, as far as there are any."""
    fields = {"replica": replica_name.get()}
    subject = working_on.get()
    if isinstance(subject, OnServer):
        fields |= {"environment": subject.environment, "instance": subject.instance}
    elif subject is not None:
        task = subject.task
        fields |= {"task_id": task.task_id, "environment": task.environment, "instance": task.instance}
        fields["owner"] = task.owner
    fields["request_id"] = _request_id()
    return {name: value for name, value in fields.items() if value}


def _request_id() -> str:
    scope = request_scope.get()
    for name, value in scope["headers"] if scope is not None else ():
        if name == b"x-request-id":
            text = value[:MAX_REQUEST_ID_CHARS].decode("latin-1")
            return scrub("".join(char if char.isprintable() and char != "]" else "?" for char in text))
    return ""


class TextFormatter(logging.Formatter):
    """Time, level, module, what is worked on, words."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(about)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = context_fields()
        shown = [f"{name}={fields[name]}" for name in ("task_id", "instance", "request_id") if name in fields]
        record.about = f" [{' '.join(shown)}]" if shown else ""
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line: ts, level, logger, message, what is worked on, and exception and stack where there are any."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "ts": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **context_fields(),
        }
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            line["exception"] = record.exc_text
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line)


def set_up_logging(level: str, form: str = "text") -> None:
    """Log to standard error, with secrets masked.

    Args:
        level: debug, info, warning or error.
        form: one of `FORMATS`.
    """
    logging.basicConfig(level=level.upper(), handlers=[make_handler(form, sys.stderr)])
    logging.getLogger("alembic").setLevel(logging.WARNING)


def make_handler(form: str, stream: TextIO) -> logging.Handler:
    """What writes lines of that form to a stream, with secrets masked."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    # On the handler, where the records of all loggers pass.
    handler.addFilter(ScrubbingFilter())
    return handler
