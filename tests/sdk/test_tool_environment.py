"""Typed methods as tools: what the model is offered, what it is answered, and where the methods run."""

from __future__ import annotations

import threading
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from tide_sdk import Start, Step, TideError, ToolEnvironment, ToolError, ToolResult, tool
from tide_sdk.server import EnvironmentServer
from tide_sdk.tool_calls import ToolLimits
from tide_sdk.wire import Message


class Address(BaseModel):
    street: str
    number: int = 1


class Shop(ToolEnvironment):
    """Notes in which thread each tool runs."""

    tool_limits = ToolLimits(max_calls=4, max_result_chars=40, max_images=1)

    def start(self, task):
        self.basket: list[str] = []
        self.threads = {threading.get_ident()}
        return Start("Buy a pear, then pay.")

    @tool
    def buy(
        self,
        item: Literal["apple", "pear"],
        copy: Annotated[int, Field(ge=1, le=3)] = 1,
        to: Address | None = None,
    ) -> str:
        """Put something into the basket.

        It is not paid for yet.

        Args:
            item: what to buy,
                one kind at a time.
            copy (int): how many.

        Returns:
            what the basket holds.
        """
        self.threads.add(threading.get_ident())
        self.basket += [item] * copy
        where = "" if to is None else f" to {to.street} {to.number}"
        return f"{len(self.basket)} in the basket{where}"

    @tool(name="look_around", description="See the shop.")
    async def look(self):
        self.threads.add(threading.get_ident())
        return ToolResult({"open": True, "prices": (1.5, float("inf"))}, ["data:image/png;base64,AA", "data:b"], 0.25)

    @tool
    def pay(self) -> ToolResult:
        """Pay and leave."""
        return ToolResult("Bye.", reward=float(self.basket == ["pear"]), terminated=True, info={"paid": 1})

    @tool
    def shout(self, text: str) -> str:
        """Say it louder."""
        if not text:
            raise ToolError("there is nothing to say")
        return text.upper() * 100

    @tool
    def break_it(self) -> None:
        """Break the till."""
        raise KeyError("till")


def call(name, arguments="{}", call_id="c"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def played(*calls, environment=Shop, content=None):
    """(the instance, the Step) of one message."""
    instance = environment()
    instance.start(None)
    return instance, await instance.step(Message(role="assistant", content=content, tool_calls=list(calls) or None))


async def answers(*calls):
    return [message["content"] for message in (await played(*calls))[1].messages]


def test_methods_become_openai_tools():
    tools = {one["function"]["name"]: one["function"] for one in Shop.tools}
    assert list(tools) == ["buy", "look_around", "pay", "shout", "break_it"]
    buy = tools["buy"]
    assert buy["description"] == "Put something into the basket.\n\nIt is not paid for yet."
    assert buy["parameters"]["required"] == ["item"]
    assert buy["parameters"]["additionalProperties"] is False
    item, copy, to = (buy["parameters"]["properties"][name] for name in ("item", "copy", "to"))
    assert item == {"enum": ["apple", "pear"], "type": "string", "description": "what to buy, one kind at a time."}
    assert copy == {"default": 1, "minimum": 1, "maximum": 3, "type": "integer", "description": "how many."}
    assert to["anyOf"][0] == {"$ref": "#/$defs/Address"}
    assert tools["look_around"]["description"] == "See the shop."


async def test_calls_run_in_order_and_after_the_end_none_does():
    instance, step = await played(
        call("buy", '{"item": "pear"}', "a"), call("pay", "", "b"), call("buy", '{"item": "apple"}', "d")
    )
    assert [(one["tool_call_id"], one["content"]) for one in step.messages] == [
        ("a", "1 in the basket"),
        ("b", "Bye."),
        ("d", "not_run"),
    ]
    assert (step.reward, step.terminated, instance.basket) == (1.0, True, ["pear"])
    assert step.info == {"paid": 1, "tool_calls": 2, "tool_errors": 0}


async def test_typed_arguments_arrive_as_their_types():
    assert await answers(call("buy", '{"item": "pear", "copy": "2", "to": {"street": "Elm"}}')) == [
        "2 in the basket to Elm 1"
    ]


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (call("buy", '{"item": "plum", "copy": 9, "x": 1}'), "item: Input should be 'apple' or 'pear'; copy: Input"),
        (call("buy"), "item: Field required"),
        (call("buy", '{"item": '), "cannot be read: not valid JSON"),
        (call("buy", "[1]"), "must be a JSON object"),
        (call("buy", 7), "must be a JSON object"),
        (call("sell" * 100), "there is no tool 'sellsell"),
        ({"id": "c"}, "the call has no function"),
        ({"id": "c", "function": {"arguments": "{}"}}, "the call names no function"),
        (call("shout", '{"text": ""}'), "error: there is nothing to say"),
    ],
)
async def test_what_the_model_does_wrong_is_told_to_it(made, told):
    instance, step = await played(made)
    instance.tool_limits = ToolLimits()
    step = await instance.step(Message(role="assistant", tool_calls=[made]))
    (message,) = step.messages
    assert (message["role"], message["tool_call_id"]) == ("tool", "c")
    assert message["content"].startswith("error: ")
    assert told in message["content"]
    assert (step.reward, step.terminated, step.info["tool_errors"]) == (None, False, 1)


@pytest.mark.parametrize("call_id", [None, 7, "x" * 513])
async def test_an_id_that_cannot_be_answered_is_left_out(call_id):
    _, step = await played(call("pay", "", call_id))
    assert step.messages == [{"role": "tool", "content": "Bye."}]


async def test_results_are_bounded_and_images_follow_in_a_user_message():
    _, step = await played(call("look_around"), call("shout", '{"text": "ha"}'), *[call("pay", "{")] * 3)
    first, second, *_, too_many, pictures = step.messages
    assert first["content"] == '{"open":true,"prices":[1.5,"Infinity"]}'[:40]
    assert second["content"] == "HA" * 20 + "\n[cut: 200 characters, 40 are shown]"
    assert too_many["content"].startswith("error: at most 4 calls in one message")
    assert pictures["role"] == "user"
    assert [part["type"] for part in pictures["content"]] == ["text", "image_url", "text"]
    assert pictures["content"][1]["image_url"]["url"] == "data:image/png;base64,AA"
    assert step.reward == 0.25


async def test_a_message_without_calls_ends_the_task_or_is_reminded():
    class Reminding(Shop):
        reminder = "Use a tool."
        max_turns = 2

    assert (await played(content="hello"))[1].terminated
    instance, step = await played(content="hello", environment=Reminding)
    assert (step.messages, step.terminated, step.truncated) == ("Use a tool.", False, False)
    assert (await instance.step(Message(role="assistant", content="again"))).truncated


async def test_a_message_without_calls_may_be_the_answer():
    class Asking(Shop):
        def without_calls(self, message):
            self.threads.add(threading.get_ident())
            return Step("Right." if "4" in message.text else "No.", reward=1.0, terminated="4" in message.text)

    _, step = await played(content="it is 4", environment=Asking)
    assert (step.reward, step.terminated) == (1.0, True)


async def test_plain_tools_run_in_the_instances_thread_and_what_breaks_names_the_tool(asgi):
    seen = []

    class Watched(Shop):
        def end(self, reason):
            seen.append((self.threads, threading.get_ident()))

    client = asgi(EnvironmentServer(Watched))
    task_id = (await client.call("POST", "/start", {"environment": "e", "key": "k"}))[1]["task_id"]
    message = {"role": "assistant", "tool_calls": [call("buy", '{"item": "pear"}'), call("look_around")]}
    status, answer = await client.call("POST", "/observation", {"task_id": task_id, "turn": 0, "message": message})
    assert (status, answer["reward"]) == (200, 0.25)
    message = {"role": "assistant", "tool_calls": [call("break_it")]}
    status, problem = await client.call("POST", "/observation", {"task_id": task_id, "turn": 1, "message": message})
    assert (status, problem["code"]) == (502, "environment_failed")
    assert "tool break_it: KeyError: 'till'" in problem["detail"]
    await client.call("POST", "/end", {"task_id": task_id})
    ((threads, own),) = seen
    assert threads == {own, threading.get_ident()}  # `look` is async: it runs on the loop


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"f": tool(lambda self, x: 1)}, "1 to 64 letters"),
        ({"f": tool(name="f")(lambda self, x: 1)}, "parameter 'x' needs a type"),
        ({"f": tool(name="f")(lambda self, *x: 1)}, "must be one that can be given by name"),
        ({"tools": []}, "gets its tools from methods marked with @tool"),
        ({"f": tool(name="f")(lambda self: 1), "g": tool(name="f")(lambda self: 2)}, "two tools are named 'f'"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_with_the_class(body, told):
    with pytest.raises(TypeError, match=told):
        type("Bad", (ToolEnvironment,), body)


def test_types_that_json_cannot_tell_are_refused():
    def shape(self, x: threading.Lock):
        pass

    def later(self, x: Nowhere):  # noqa: F821
        pass

    with pytest.raises(TypeError, match="tool shape: a parameter's type cannot be told as JSON"):
        type("Bad", (ToolEnvironment,), {"shape": tool(shape)})
    with pytest.raises(TypeError, match="tool later: name 'Nowhere' is not defined"):
        type("Bad", (ToolEnvironment,), {"later": tool(later)})


async def test_tools_are_inherited_and_replaced():
    class Second(Shop):
        @tool
        def pay(self, tip: int) -> str:
            """Pay with a tip."""
            return f"thanks for {tip}"

    _, step = await played(call("pay", '{"tip": 2}'), call("buy", '{"item": "pear"}'), environment=Second)
    assert [one["content"] for one in step.messages] == ["thanks for 2", "1 in the basket"]


async def test_a_tool_that_refuses_the_whole_task_fails_it_like_any_exception():
    class Refusing(Shop):
        @tool
        def refuse(self) -> str:
            """Refuse."""
            raise TideError("invalid", "no")

    with pytest.raises(RuntimeError, match="tool refuse: TideError"):
        await played(call("refuse"), environment=Refusing)
