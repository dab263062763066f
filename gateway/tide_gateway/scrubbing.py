"""The last line of defence against secrets in logs: whatever a line says, keys and bearer values in it are masked.

No code of ours logs a secret; libraries and environments' error texts are not ours.
"""

from __future__ import annotations

import logging
import re

_KEY = re.compile(r"(tide_[0-9a-f]{8}_)[A-Za-z0-9_-]+")
_BEARER = re.compile(r"(bearer\s+)(?!tide_)[^\s'\",;)\]}]+", re.IGNORECASE)


def scrub(text: str) -> str:
    """The text with the secret part of keys and with bearer values masked; a key's id stays, to find and revoke it."""
    return _BEARER.sub(r"\1***", _KEY.sub(r"\1***", text))


class ScrubbingFilter(logging.Filter):
    """Masks secrets in a record's words and traceback; belongs on handlers, where records of all loggers pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask what the record says; it is never dropped."""
        record.msg, record.args = scrub(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = scrub(record.exc_text)
        if record.stack_info:
            record.stack_info = scrub(record.stack_info)
        return True
