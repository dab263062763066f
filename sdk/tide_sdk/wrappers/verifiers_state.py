"""Messages, rows and the state of one rollout, in the form that `verifiers`-style code reads them."""

from __future__ import annotations

import copy
import json
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tide_sdk.wire import Message


class Said(dict[str, Any]):
    """A dict whose members are attributes too: some files read `message["content"]`, others `message.content`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Said:
        return Said(copy.deepcopy(dict(self), memo))


def said(message: Mapping[str, Any]) -> Any:
    """An OpenAI message as the file's own package would give it, and where that is not loaded, as a `Said`.

    A tool call has `function.name` and `function.arguments` as OpenAI writes them, and `name` and `arguments` beside.
    """
    convert = getattr(sys.modules.get("verifiers.utils.message_utils"), "from_raw_message", None)
    if convert is not None:
        return convert(dict(message))
    whole = Said(message)
    whole.setdefault("content", None)
    calls = message.get("tool_calls")
    if calls:
        whole["tool_calls"] = [_call(cast("Mapping[str, Any]", call)) for call in calls]
    return whole


def openai_messages(given: Any) -> list[dict[str, Any]]:
    """What a file answers, a text or messages of any make, as OpenAI messages; a text is the user's."""
    if given is None:
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    listed: list[Any] = [given] if isinstance(given, Mapping) or hasattr(given, "role") else list(given)
    return [_openai(one) for one in listed]


def prompt_of(row: Mapping[str, Any], system_prompt: str | None, few_shot: Any) -> list[dict[str, Any]]:
    """A row's first messages: its `prompt`, or its `question` after the system prompt and the examples.

    Raises:
        ValueError: it has neither.
    """
    prompt = row.get("prompt")
    if prompt is not None and not isinstance(prompt, str):
        messages = openai_messages(prompt)
        if system_prompt and not (messages and messages[0]["role"] == "system"):
            return [{"role": "system", "content": system_prompt}, *messages]
        return messages
    question = prompt or row.get("question")
    if not isinstance(question, str):
        raise ValueError("a row of the dataset needs a `prompt` or a `question`")
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, *openai_messages(few_shot), {"role": "user", "content": question}]


def new_state(row: Mapping[str, Any], prompt: Sequence[Mapping[str, Any]]) -> Said:
    """The state of a rollout that begins, with the members that files of all versions look for."""
    own = copy.deepcopy(dict(row))
    info: Any = own.get("info") or {}
    if isinstance(info, str):
        info = own["info"] = json.loads(info)
    return Said(
        input=own,
        prompt=[said(message) for message in prompt],
        completion=[],
        answer=own.get("answer", ""),
        info=info,
        task=own.get("task", "default"),
        example_id=own.get("example_id", 0),
        turn=0,
        responses=[],
        trajectory=[],
        trajectory_id=uuid.uuid4().hex,
        client=None,
        model="",
        sampling_args={},
        is_completed=False,
        is_truncated=False,
        stop_condition=None,
        final_env_response=None,
        reward=None,
        metrics=None,
        error=None,
        timing=_timing(),
    )


def add_turn(state: Said, message: Message) -> Any:
    """Note the model's message as a turn; gives it as the file reads it."""
    reply = said(message.as_dict())
    step = Said(prompt=[*state["prompt"], *state["completion"]], completion=[reply], response=reply, tokens=None)
    step |= {"reward": None, "advantage": None, "is_truncated": False, "trajectory_id": state["trajectory_id"]}
    state["trajectory"].append(Said(step, extras={}))
    state["responses"].append(reply)
    state["completion"].append(reply)
    state["turn"] += 1
    return reply


def _timing() -> Said:
    spans = {name: Said(start=0.0, end=0.0, spans=[]) for name in ("setup", "generation", "scoring", "env", "model")}
    return Said(spans, generation_ms=0.0, scoring_ms=0.0, total_ms=0.0, start_time=0.0)


def _call(call: Mapping[str, Any]) -> Said:
    function = Said(call.get("function") or {})
    name, arguments = function.get("name", ""), function.get("arguments", "")
    return Said(call, id=call.get("id", ""), function=function, name=name, arguments=arguments)


def _openai(message: Any) -> dict[str, Any]:
    if hasattr(message, "model_dump"):
        message = message.model_dump(exclude_none=True)
    if not isinstance(message, Mapping):
        raise TypeError(f"a {type(message).__name__} is not a message")
    plain = {key: value for key, value in cast("Mapping[str, Any]", message).items() if value is not None}
    calls = plain.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_openai_call(call) for call in calls]
    return plain


def _openai_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {"name": call.get("name", ""), "arguments": call.get("arguments", "")}
    return {"id": call.get("id", ""), "type": "function", "function": dict(function)}
