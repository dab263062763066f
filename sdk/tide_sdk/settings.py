"""The one place where the commands for people read secrets from the process environment."""

from __future__ import annotations

import os

GATEWAY_TOKEN_VARIABLE = "TIDE_GATEWAY_TOKEN"  # noqa: S105 (the variable's name, not a token)


def gateway_token() -> str | None:
    """The gateway's bearer token, None where it is not set."""
    return variable(GATEWAY_TOKEN_VARIABLE)


def variable(name: str) -> str | None:
    """A variable's value, None where it is empty or not set."""
    return os.environ.get(name) or None
