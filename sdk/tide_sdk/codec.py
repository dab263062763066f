"""JSON in and out: orjson where it is installed, else the standard library, with one behaviour.

Refused both ways: NaN and infinities, lone surrogates, integers beyond 64 bits, keys that are not strings, and anything
that is not plain JSON data. So a body written with either library is readable with the other.
"""

from __future__ import annotations

import json
import math
from typing import Any, cast

try:
    import orjson
except ImportError:
    orjson = None

MAX_DEPTH = 250
"""Deepest nesting that is accepted."""
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


class CodecError(ValueError):
    """The bytes are not JSON, or the data cannot be written as JSON."""


def dumps(data: Any) -> bytes:
    """Write plain data as UTF-8 JSON without spaces.

    Raises:
        CodecError: something in the data is not plain JSON; the caller's data is at fault.
    """
    if orjson is None:
        check_plain(data)
        return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    try:
        body = orjson.dumps(data, option=orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME)
    except (TypeError, RecursionError) as error:
        raise CodecError(f"the data cannot be written as JSON: {error}") from error
    if b"null" in body:
        # orjson writes NaN as null without a word: look closer only where a null was written.
        _check_finite(data)
    return body


def compact(body: bytes) -> bytes:
    """The same bytes in no more memory than they need, for a body that is kept: orjson's own have room to grow."""
    return bytes(memoryview(body))


def loads(body: bytes | bytearray | memoryview | str) -> Any:
    """Read UTF-8 JSON.

    Raises:
        CodecError: the bytes are not JSON as this module writes it.
    """
    try:
        if orjson is not None:
            return orjson.loads(body)
        text = body if isinstance(body, str) else bytes(body).decode()
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not valid JSON: {error}") from error
    check_plain(data)
    return data


def same(one: Any, other: Any) -> bool:
    """True if two parsed values are the same JSON, however deep: key order is free, 1 is 1.0, and true is not 1."""
    pairs = [(one, other)]
    while pairs:
        a, b = pairs.pop()
        if isinstance(a, dict) and isinstance(b, dict):
            first, second = cast("dict[str, Any]", a), cast("dict[str, Any]", b)
            if first.keys() != second.keys():
                return False
            pairs.extend((value, second[key]) for key, value in first.items())
        elif isinstance(a, list) and isinstance(b, list):
            these, those = cast("list[Any]", a), cast("list[Any]", b)
            if len(these) != len(those):
                return False
            pairs.extend(zip(these, those, strict=True))
        elif isinstance(a, bool) is not isinstance(b, bool) or a != b:
            return False
    return True


def _check_finite(data: Any) -> None:
    """Check the numbers of data that orjson has written; it refused all else that is not plain."""
    rest: list[Any] = [data]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            continue
        if isinstance(one, dict):
            rest.extend(cast("dict[str, Any]", one).values())
        elif isinstance(one, (list, tuple)):
            rest.extend(cast("list[Any]", one))
        elif isinstance(one, float) and not math.isfinite(one):
            raise CodecError(f"{one} is not a JSON number")


def check_plain(data: Any, depth: int = 0) -> None:
    """Check that `data` is plain, finite JSON data.

    Raises:
        CodecError: naming the kind of value that is not.
    """
    if data is None or data is True or data is False:
        return
    if isinstance(data, str):
        _check_text(data)
    elif isinstance(data, int):
        if not _MIN_INT <= data <= _MAX_INT:
            raise CodecError("an integer is beyond 64 bits")
    elif isinstance(data, float):
        if not math.isfinite(data):
            raise CodecError(f"{data} is not a JSON number")
    elif depth >= MAX_DEPTH:
        raise CodecError(f"nested deeper than {MAX_DEPTH}")
    elif isinstance(data, dict):
        for key, value in cast("dict[Any, Any]", data).items():
            if not isinstance(key, str):
                raise CodecError(f"the key {key!r} is not a string")
            _check_text(key)
            check_plain(value, depth + 1)
    elif isinstance(data, (list, tuple)):
        for value in cast("list[Any]", data):
            check_plain(value, depth + 1)
    else:
        raise CodecError(f"a {type(data).__name__} is not plain JSON data")


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CodecError("a string holds a lone surrogate, which UTF-8 cannot carry") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
