"""Property: what the quick look at a turn's bodies takes, the contract's models take too, with the same values."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from tide_gateway.plain import MAX_BRACKETS, few_brackets, plain_action, plain_answer
from tide_sdk import codec
from tide_sdk.clocks import ClockName
from tide_sdk.wire import MAX_PARTS, ObservationRequest, ObservationResponse

WORDS = st.text(st.characters(codec=None), max_size=6) | st.sampled_from(["", "\0", "\ud800", "a\n", "é" * 129])
ODD = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.sampled_from([-0.0, 0.5, 1e300, 2**31 - 1, 2**31])),
    *(WORDS, st.lists(st.integers(), max_size=2), st.dictionaries(WORDS, st.booleans(), max_size=2)),
)
DEEP = st.integers(0, 230).map(lambda depth: json.loads("[" * depth + "]" * depth) if depth else {})
CALL = st.dictionaries(st.sampled_from(["id", "type", "function", "x"]), ODD | DEEP, max_size=3)
CALLS = st.none() | st.lists(CALL, max_size=3) | st.lists(ODD, max_size=2)
NAMES = st.sampled_from(["name", "text", "model_config", "model_extra", "as_dict", "", "__dict__"])


def _messages(*roles: str) -> st.SearchStrategy[dict[str, Any]]:
    """Messages as they come, and such as should not."""
    known = {
        "content": st.none() | WORDS | st.lists(ODD, max_size=2),
        "tool_calls": CALLS,
        "tool_call_id": st.none() | WORDS | st.sampled_from(["x" * 512, "x" * 513]),
    }
    whole = st.fixed_dictionaries({"role": st.sampled_from(roles)}, optional=known)
    return st.builds(lambda message, more: more | message, whole, st.dictionaries(NAMES, ODD, max_size=1))


def _spoilt(bodies: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """The same bodies, some with one field more, less or odd."""

    def spoil(body: dict[str, Any], name: str, value: Any, how: str) -> dict[str, Any]:
        name = name or next(iter(body))
        if how == "as it is":
            return body
        return {key: part for key, part in body.items() if key != name} if how == "without" else body | {name: value}

    ways = st.sampled_from(["as it is", "as it is", "without", "with"])
    some = st.sampled_from(
        ["turn", "task_id", "message", "messages", "reward", "terminated", "info", "clocks", "x", ""]
    )
    return st.builds(spoil, bodies, some, ODD | st.lists(DEEP, max_size=1), ways)


CLOCK = _spoilt(st.fixed_dictionaries({name: st.sampled_from([0, 1.5, -1, 2**63]) for name in (
    "limit_s", "consumed_s", "remaining_s"
)}))  # fmt: skip
ACTIONS = _spoilt(
    st.fixed_dictionaries(
        {
            "task_id": st.sampled_from(["t", "x" * 128, "x" * 129, "a\x7f", "é", ""]) | WORDS,
            "turn": st.integers(0, 3) | ODD,
            "message": _messages("assistant", "assistant", "user") | ODD,
        }
    )
)
ANSWERS = _spoilt(
    st.fixed_dictionaries(
        {
            "turn": st.integers(-1, 3) | ODD,
            "messages": st.lists(_messages("user", "tool", "x") | ODD, max_size=2),
            "reward": st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**64 - 1),
            "terminated": st.booleans() | ODD,
            "truncated": st.booleans(),
            "info": st.dictionaries(WORDS, ODD | DEEP, max_size=2) | ODD,
            "clocks": st.dictionaries(st.sampled_from([*ClockName, "x"]).map(str), CLOCK, max_size=3),
        }
    )
)


def _read(body: bytes) -> dict[str, Any] | None:
    try:
        return codec.loads(body) if few_brackets(body) else None
    except codec.CodecError:
        return None


@given(ACTIONS)
@example({"task_id": "t", "turn": 0, "message": {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}})
def test_a_plain_action_is_what_the_model_reads(action: dict[str, Any]) -> None:
    body = json.dumps(action).encode()
    data = _read(body)
    plain = plain_action(data) if data is not None else None
    if plain is not None:
        read = ObservationRequest.model_validate_json(body, strict=True)
        assert plain == (read.task_id, read.turn, action["message"])
        assert type(plain[1]) is int


@given(ANSWERS)
def test_a_plain_answer_is_what_the_model_reads(answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    data = _read(body)
    plain = plain_answer(data) if data is not None else None
    if plain is not None:
        read = ObservationResponse.model_validate_json(body, strict=True)
        assert plain == (read.turn, read.terminated, read.truncated)


def _answer(**changes: Any) -> dict[str, Any]:
    clock = {"limit_s": 1.0, "consumed_s": 0, "remaining_s": 1.0}
    whole = {"turn": 1, "messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}], "reward": None, "info": {}}
    return (
        whole | {"terminated": False, "truncated": False, "clocks": {str(name): clock for name in ClockName}} | changes
    )


def test_what_agents_and_environments_usually_send_is_plain() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    assert plain_action({"task_id": "t", "turn": 3, "message": message}) == ("t", 3, message)
    assert plain_answer(_answer()) == (1, False, False)
    assert plain_answer(_answer(reward=1, info={"any": [{"thing": 1}]}, truncated=True)) == (1, False, True)


def test_what_the_models_bound_is_not_plain() -> None:
    message = {"role": "assistant", "tool_calls": [{}] * (MAX_PARTS + 1)}
    assert plain_action({"task_id": "t", "turn": 0, "message": message}) is None
    assert plain_answer(_answer(messages=[{"role": "user"}] * (MAX_PARTS + 1))) is None
    assert plain_answer(_answer(info={str(number): 0 for number in range(MAX_PARTS + 1)})) is None


def test_a_second_field_of_the_same_name_counts_as_in_the_model() -> None:
    body = b'{"task_id":"t","turn":-1,"turn":2,"message":{"role":"user","role":"assistant"}}'
    read = ObservationRequest.model_validate_json(body, strict=True)
    assert plain_action(codec.loads(body)) == (read.task_id, read.turn, {"role": "assistant"})


def test_the_deepest_body_of_few_brackets_can_be_read_by_the_model() -> None:
    depth = MAX_BRACKETS - 2
    body = b'{"task_id":"t","turn":0,"turn":%b,"turn":0,"message":{"role":"assistant"}}' % (b"[" * depth + b"]" * depth)
    assert few_brackets(body)
    assert ObservationRequest.model_validate_json(body, strict=True).turn == 0
