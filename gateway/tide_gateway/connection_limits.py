"""The limits of connections, before any of our code sees a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection, and all together, may take.

    Attributes:
        max_connections: open at once; one more is answered 503, or cut where it would be TLS.
        max_header_bytes: of a request's header, its trailer included; more is 431.
        max_header_fields: their number; more is 431.
        max_url_bytes: path and query; more is 414.
        handshake_s: seconds for a TLS handshake; then the connection is cut.
        first_byte_s: seconds that a new connection may be silent.
        header_s: seconds from a header's first byte to its last; then 408.
        body_pause_s: longest silence within a body; then 408.
        body_s: seconds for a whole body; then 408.
        rest_s: seconds for the rest of a body whose request is already answered.
        answer_pause_s: longest time in which a caller takes nothing of an answer; then the connection is cut.
        answer_s: seconds for a whole answer that does not go out at once; then the connection is cut.
        max_pipelined: requests that wait for the answer of an earlier one; with one more the connection is cut.
        max_unsent_bytes: of an answer that a connection keeps before whoever answers has to wait.
    """

    max_connections: int = 10_000
    max_header_bytes: int = 32 * 1024
    max_header_fields: int = 100
    max_url_bytes: int = 8 * 1024
    handshake_s: float = 10.0
    first_byte_s: float = 75.0
    header_s: float = 10.0
    body_pause_s: float = 30.0
    body_s: float = 120.0
    rest_s: float = 5.0
    answer_pause_s: float = 30.0
    answer_s: float = 120.0
    max_pipelined: int = 16
    max_unsent_bytes: int = 16 * 1024
