"""Tools of an agent's own: their definitions for the model, and the running of their calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from pydantic import ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation

from tide_sdk import codec

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOT_RUN = "not_run: call this tool in a message of its own, apart from {names}"
_MAX_ERRORS = 5


@dataclass(frozen=True, slots=True)
class _Tool:
    function: Callable[..., Any]
    read: Callable[[dict[str, Any]], dict[str, Any]]
    """Checks and converts the arguments of a call. Raises ValueError."""


class LocalTools:
    """The own tools of one task."""

    def __init__(self) -> None:
        self._tools: dict[str, _Tool] = {}

    def add(
        self,
        function: Callable[..., Any],
        name: str | None,
        description: str | None,
        parameters: Mapping[str, Any] | None,
        taken: set[str],
    ) -> dict[str, Any]:
        """Take a tool in; returns its OpenAI definition. Arguments as in `AgentContext.add_tool`."""
        called = name or getattr(function, "__name__", "")
        if _NAME.fullmatch(called) is None:
            raise ValueError(f"add_tool: {called!r} is no tool's name: 1 to 64 letters, digits, _ or -; give `name`")
        if called in taken or called in self._tools:
            raise ValueError(f"add_tool: there is a tool {called!r} already; give another `name`")
        if parameters is None:
            schema, read = _of_annotations(called, function)
        else:
            schema, read = dict(parameters), partial(_bound, function)
        self._tools[called] = _Tool(function, read)
        told = inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0] if description is None else description
        return {"type": "function", "function": {"name": called, "description": told, "parameters": schema}}

    def plan(self, reply: Mapping[str, Any]) -> list[tuple[str, Callable[[], Any]]]:
        """(id of the call, what runs it) for each call of the reply; [] if none is for a tool of the agent's own.

        What runs it returns the tool's result, or an awaitable of it. Wrong arguments are such a result, told to the
        model; what a tool's function raises is the agent's failure.
        """
        calls = [_read_call(call) for call in cast("list[Any]", reply.get("tool_calls") or [])]
        own = [name for _, name, _ in calls if name in self._tools]
        if not own:
            return []
        words = _NOT_RUN.format(names=", ".join(dict.fromkeys(own)))
        return [(call_id, partial(self._run, name, arguments, words)) for call_id, name, arguments in calls]

    def _run(self, name: str, arguments: str, not_run: str) -> Any:
        tool = self._tools.get(name)
        if tool is None:
            return not_run
        try:
            given = codec.loads(arguments or "{}")
            if not isinstance(given, dict):
                return "error: the arguments are not a JSON object"
            read = tool.read(cast("dict[str, Any]", given))
        except ValidationError as error:
            told = [f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors()]
            return "error: " + "; ".join(told[:_MAX_ERRORS])
        except codec.CodecError as error:
            return f"error: the arguments are {error}"
        except ValueError as error:
            return f"error: {error}"
        return tool.function(**read)


def tool_message(call_id: str, result: Any) -> dict[str, Any]:
    """A tool's result as the model gets it: text as it is, anything else as JSON."""
    content = result if isinstance(result, str) else codec.dumps(result).decode()
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else dict[str, Any]()


def _read_call(call: Any) -> tuple[str, str, str]:
    """(id, name, arguments) of a tool call; what is missing is empty."""
    fields = _mapping(call)
    function = _mapping(fields.get("function"))
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else codec.dumps(arguments or {}).decode()
    return str(fields.get("id") or ""), str(function.get("name") or ""), text


def _of_annotations(
    name: str, function: Callable[..., Any]
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]:
    """The schema of a function's parameters, and what checks a call's arguments."""
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"add_tool: {name} takes {parameter}; a tool's arguments have names")
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        fields[parameter.name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    try:
        model = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema()
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation, NameError) as error:
        raise TypeError(f"add_tool: {name}: {error}; give `parameters`") from error
    schema.pop("title", None)

    def read(arguments: dict[str, Any]) -> dict[str, Any]:
        found = model.model_validate(arguments)
        return {field: getattr(found, field) for field in arguments}

    return schema, read


def _bound(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, if the function takes them."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return arguments
