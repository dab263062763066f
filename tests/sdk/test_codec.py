"""The codec behaves the same with orjson and with the standard library."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_sdk import codec


@pytest.fixture(params=["orjson", "json"])
def backend(request, monkeypatch):
    if request.param == "json":
        monkeypatch.setattr(codec, "orjson", None)
    elif codec.orjson is None:
        pytest.skip("orjson is not installed")
    return request.param


@pytest.mark.parametrize(
    "data", [{"a": [1, 2.5, None, True, "ü😀"]}, [], "x", 2**63, -(2**63), {"nested": {"": {}}}, (1,)]
)
def test_plain_data_goes_there_and_back(backend, data):
    assert codec.loads(codec.dumps(data)) == (list(data) if isinstance(data, tuple) else data)


@pytest.mark.parametrize(
    "data",
    [
        float("nan"),
        [float("inf")],
        {"a": {"b": -float("inf")}},
        "\ud800",
        {"\udfff": 1},
        2**65,
        {1: 2},
        {"a": object()},
        b"x",
    ],
)
def test_what_is_not_json_is_refused_when_written(backend, data):
    with pytest.raises(codec.CodecError):
        codec.dumps(data)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"NaN", b"[Infinity]", b'"\\ud800"', b"\xff", b"\xef\xbb\xbf1", b"{'a':1}", b"[1,]", b"[" * 100_000],
)
def test_what_is_not_json_is_refused_when_read(backend, body):
    with pytest.raises(codec.CodecError):
        codec.loads(body)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_both_libraries_read_what_the_other_wrote(data):
    fast = codec.dumps(data)
    kept, codec.orjson = codec.orjson, None
    try:
        assert codec.loads(fast) == data
        slow = codec.dumps(data)
    finally:
        codec.orjson = kept
    assert codec.loads(slow) == data


def test_same_ignores_the_order_of_keys_but_not_types():
    assert codec.same({"a": 1, "b": [2]}, {"b": [2], "a": 1})
    assert codec.same({"a": [1, None]}, {"a": [1.0, None]})
    assert not codec.same({"a": None}, {})
    assert not codec.same([1], [1, 1])
    assert not codec.same({"a": "1"}, {"a": 1})
    assert not codec.same({"a": 1}, {"a": True})
    assert not codec.same([1, 2], [2, 1])
