"""Tokens and owners: tokens are kept as digests, compared in constant time, and never logged."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from tide_sdk.errors import TideError

LOCAL_OWNER = "local"
_SCHEME = b"bearer "


class Owners:
    """Says who calls.

    Args:
        tokens: token -> owner; empty means that every call is by the owner `local`.
    """

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._digests = [(hashlib.sha256(token.encode()).digest(), owner) for token, owner in tokens.items()]

    def owner(self, authorization: bytes | None) -> str:
        """The owner of a call.

        Args:
            authorization: the value of the header `Authorization`, None if there is none.

        Raises:
            TideError: the token is missing or unknown.
        """
        if not self._digests:
            return LOCAL_OWNER
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise TideError("unauthorized", "send the header Authorization: Bearer TOKEN")
        given = hashlib.sha256(authorization[len(_SCHEME) :].strip()).digest()
        found: str | None = None
        # All are compared, so that the time tells nothing about which one fits.
        for digest, owner in self._digests:
            if hmac.compare_digest(digest, given):
                found = owner
        if found is None:
            raise TideError("unauthorized", "the token is unknown")
        return found
