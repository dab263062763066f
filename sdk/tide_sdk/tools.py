"""Environments whose actions are tool calls: typed methods become OpenAI tools.

class Shop(ToolEnvironment):
    name = "shop"

    def start(self, task: StartInfo) -> Start:
        self.basket: list[str] = []
        return Start("Buy a pear, then pay.")

    @tool
    def buy(self, item: Literal["apple", "pear"], count: int = 1) -> str:
        '''Put something into the basket.'''
        self.basket += [item] * count
        return f"The basket holds {self.basket}."

    @tool
    def pay(self) -> ToolResult:
        '''Pay for the basket and leave.'''
        return ToolResult("Thank you.", reward=float(self.basket == ["pear"]), terminated=True)
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar, cast, get_type_hints, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from tide_sdk.environment import Environment, Step
from tide_sdk.tool_calls import (
    ToolError,
    ToolLimits,
    ToolResult,
    as_result,
    definition,
    is_tool_name,
    run_calls,
    unknown_tool,
)
from tide_sdk.wire import Message

_MARK = "__tide_tool__"
_MAX_PROBLEMS = 5
F = TypeVar("F", bound=Callable[..., Any])


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(*, name: str = ..., description: str = ...) -> Callable[[F], F]: ...
def tool(function: F | None = None, /, *, name: str = "", description: str = "") -> F | Callable[[F], F]:
    """Mark a method of a `ToolEnvironment` as a tool of the model; `async def` or `def`.

    Args:
        function: the method; its typed parameters are the tool's, its docstring is the description.
        name: what the model calls it, if not the method's name.
        description: what the model reads about it, if not the docstring.
    """

    def mark(marked: F) -> F:
        setattr(marked, _MARK, (name, description))
        return marked

    return mark if function is None else mark(function)


class FunctionTool:
    """One function as a tool: its definition, and arguments checked against its signature.

    Args:
        function: typed; parameters named `self` and those in `hidden` are not the model's.
        name: what the model calls it; the function's name if empty.
        description: what the model reads; the docstring if empty.
        hidden: parameters that somebody else fills in.

    Raises:
        TypeError: the signature cannot be told to a model; names tool and parameter.
    """

    def __init__(
        self, function: Callable[..., Any], *, name: str = "", description: str = "", hidden: Sequence[str] = ()
    ) -> None:
        self.name = name or function.__name__
        self.function = function
        if not is_tool_name(self.name):
            raise TypeError(f"tool {self.name!r}: a name has 1 to 64 letters, digits, _ or -")
        words, described = read_docstring(inspect.getdoc(function) or "")
        self._arguments, self._names = _arguments_model(self.name, function, {"self", *hidden})
        schema = self._arguments.model_json_schema(by_alias=True, schema_generator=_PlainSchema)
        schema.pop("title", None)
        schema.setdefault("properties", {})
        for parameter, shape in schema["properties"].items():
            if parameter in described and "description" not in shape:
                shape["description"] = described[parameter]
        self.definition = definition(self.name, description or words, schema)

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them.

        Raises:
            ToolError: they do not fit; says which and why, for the model.
        """
        try:
            read = self._arguments.model_validate(dict(arguments))
        except ValidationError as error:
            problems = [_problem(one) for one in error.errors(include_url=False)[:_MAX_PROBLEMS]]
            raise ToolError(f"the arguments of {self.name} do not fit: {'; '.join(problems)}") from error
        return {name: getattr(read, field) for field, name in self._names.items()}


class ToolEnvironment(Environment):
    """Base class of environments whose actions are tool calls; define `start`, and methods marked with `@tool`.

    The calls of one message are one turn and run in order. Each is answered with a `tool` message: what the method
    returned (a text, data that is shown as JSON, or a `ToolResult`), or `error: ...` where the model called a tool that
    is not there, gave arguments that do not fit, or the method raised `ToolError`. After a result that ends the task
    the rest are answered `not_run`. Another exception of a tool fails the task, as in any environment.

    A plain method runs in the thread of its instance, an `async def` on the event loop, as everywhere.

    Attributes:
        reminder: what a message without tool calls is answered; empty lets such a message end the task.
        max_turns: messages after which the task is truncated; None for no bound.
        tool_limits: calls in one message, characters and images of what they are answered.
    """

    reminder: str = ""
    max_turns: int | None = None
    tool_limits: ToolLimits = ToolLimits()
    _function_tools: ClassVar[Mapping[str, FunctionTool]] = {}
    _num_turns: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "tools" in vars(cls):
            raise TypeError(f"{cls.__name__}.tools: a ToolEnvironment gets its tools from methods marked with @tool")
        found: dict[str, FunctionTool] = {}
        for attribute in dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base)):
            function = inspect.getattr_static(cls, attribute)
            mark = getattr(function, _MARK, None)
            if mark is None:
                continue
            made = FunctionTool(function, name=mark[0], description=mark[1])
            if made.name in found:
                raise TypeError(f"{cls.__name__}: two tools are named {made.name!r}")
            found[made.name] = made
        cls._function_tools = found
        cls.tools = [made.definition for made in found.values()]

    async def step(self, message: Message) -> Step:
        """Run the calls of one message; override `without_calls` and `call_tool` rather than this."""
        self._num_turns += 1
        if message.tool_calls:
            step = await run_calls(message.tool_calls, self.call_tool, self.tool_limits)
        else:
            step = cast("Step", await self._call(self.without_calls, message))
        if self.max_turns is None or self._num_turns < self.max_turns or step.terminated:
            return step
        return Step(step.messages, step.reward, truncated=True, info=step.info)

    def without_calls(self, message: Message) -> Step | Awaitable[Step]:
        """Act on a message that calls no tool: `reminder` is the answer, or, where it is empty, the task ends."""
        return Step(self.reminder) if self.reminder else Step(terminated=True)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Run one call; override it to add tools that are no methods.

        Args:
            name: as the model wrote it.
            arguments: a JSON object, not yet checked.

        Raises:
            ToolError: a mistake to tell the model.
        """
        found = self._function_tools.get(name)
        if found is None:
            raise unknown_tool(name, list(self._function_tools))
        return as_result(await self._call(partial(found.function, self, **found.read(arguments))))

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        return await self.in_thread(function, *args)


class _PlainSchema(GenerateJsonSchema):
    """JSON Schema without generated titles, which only cost the model tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """A docstring's words for the model, and what its section `Args:` (Google style) says of each parameter."""
    words: list[str] = []
    described: dict[str, str] = {}
    section, current = "", ""
    for line in text.splitlines():
        heading = line.strip() if line and not line[0].isspace() else ""
        if heading in ("Args:", "Arguments:", "Returns:", "Raises:", "Yields:", "Example:", "Examples:"):
            section = heading
        elif not section or (heading and section):
            section = ""
            words.append(line)
        elif section.startswith("Arg") and line.strip():
            name, colon, rest = line.strip().partition(":")
            name = name.partition(" (")[0].strip()
            if colon and name.isidentifier() and len(line) - len(line.lstrip()) <= 4:
                current = name
                described[name] = rest.strip()
            elif current:
                described[current] += " " + line.strip()
    return "\n".join(words).strip(), described


def _arguments_model(
    tool_name: str, function: Callable[..., Any], hidden: set[str]
) -> tuple[type[BaseModel], dict[str, str]]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(
            f"tool {tool_name}: {error}; types of parameters are defined at the module's top, before the class"
        ) from error
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in hidden:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {tool_name}: parameter {name!r} must be one that can be given by name")
        if name not in hints:
            raise TypeError(f"tool {tool_name}: parameter {name!r} needs a type")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = f"p{len(fields)}"  # a model's own names, such as `schema` or `copy`, may be parameters too
        fields[field] = (hints[name], Field(default, alias=name))
        names[field] = name
    try:
        model = create_model(tool_name, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except PydanticUserError as error:
        raise TypeError(f"tool {tool_name}: a parameter's type cannot be told as JSON: {error.message}") from error
    return model, names


def _problem(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    return f"{where}: {error['msg']}" if where else str(error["msg"])
