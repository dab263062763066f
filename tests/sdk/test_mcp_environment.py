"""Real MCP servers, over HTTP in this process and as programs, played through a real environment server."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import mcp_notes_server
import mcp_paged_server
import pytest

from tide_sdk.client import GatewayClient
from tide_sdk.environment import StartInfo
from tide_sdk.mcp_environment import McpEnvironment
from tide_sdk.server import EnvironmentServer
from tide_sdk.tools import tool

SUPPORT = Path(__file__).parents[1] / "support"
NOTES = [sys.executable, str(SUPPORT / "mcp_notes_server.py")]


def call(name: str, arguments: str = "{}", call_id: str = "c1") -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def says(task_id: str, turn: int, *calls: dict, content: str | None = None) -> dict:
    message = {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})
    return {"task_id": task_id, "turn": turn, "message": message}


class Player:
    """Plays one task, turn by turn."""

    def __init__(self, client, started: dict) -> None:
        self.client, self.started = client, started
        self.task_id, self.turn = started["task_id"], 0

    async def say(self, *calls: dict, content: str | None = None) -> dict:
        status, answer = await self.client.call(
            "POST", "/observation", says(self.task_id, self.turn, *calls, content=content)
        )
        assert status == 200, answer
        self.turn += 1
        return answer

    async def tell(self, name: str, **arguments) -> str:
        return (await self.say(call(name, json.dumps(arguments))))["messages"][0]["content"]

    async def end(self) -> dict:
        return (await self.client.call("POST", "/end", {"task_id": self.task_id}))[1]


@pytest.fixture
async def player(asgi):
    """`await player(task, **options)`: a started task; all are ended afterwards."""
    players: list[Player] = []

    async def start(task=None, environment=McpEnvironment, **options):
        client = asgi(EnvironmentServer(environment, options=options))
        body = {"environment": "mcp", "key": "k", "task": {"prompt": "Take notes."} | (task or {})}
        status, started = await client.call("POST", "/start", body)
        assert status == 201, started
        players.append(Player(client, started))
        return players[-1]

    yield start
    for one in players:
        await one.end()


@pytest.fixture
async def notes_url(uvicorn_server):
    async with uvicorn_server(mcp_notes_server.build().streamable_http_app()) as url:
        yield f"{url}/mcp"


@pytest.fixture
async def paged_url(uvicorn_server):
    async with uvicorn_server(mcp_paged_server.build(5).streamable_http_app()) as url:
        yield f"{url}/mcp"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_tools_are_offered_under_names_that_openai_takes(player, notes_url):
    task = await player({"system": "Be brief."}, url=notes_url)
    tools = {one["function"]["name"]: one["function"] for one in task.started["tools"]}
    assert {"write_note", "write_note_2", "count"} <= tools.keys()
    assert tools["write_note"]["description"] == "Keep a note."
    assert tools["write_note"]["parameters"]["required"] == ["text"]
    assert task.started["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Take notes."},
    ]
    assert await task.tell("write_note", text="a", times=2) == "kept 2"
    assert await task.tell("write_note_2", text="b") == "kept 3"


async def test_every_kind_of_content_reaches_the_model(player, notes_url):
    task = await player(url=notes_url)
    answer = await task.say(call("look"), call("count", call_id="c2"))
    first, second, pictures = answer["messages"]
    assert first["content"].splitlines() == [
        "a picture:",
        "[audio: audio/wav, 15 bytes, left out]",
        "note://1:",
        "in a resource",
    ]
    assert first["tool_call_id"] == "c1"
    assert json.loads(second["content"]) == {"notes": 0}
    assert pictures["role"] == "user"
    assert pictures["content"][1]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")


async def test_the_models_mistakes_are_told_and_the_task_goes_on(player, notes_url):
    task = await player(url=notes_url, call_limit_s=3.0)
    assert "the pen is empty" in await task.tell("fail")
    assert (await task.tell("write_note", times="x")).startswith("error:")
    assert (await task.tell("nothing")).startswith("error: there is no tool 'nothing'")
    assert await task.tell("sleep") == "error: sleep gave no answer within 3 s"
    assert await task.tell("write_note", text="a") == "kept 1"


async def test_each_task_has_a_server_of_its_own_with_the_declared_variables_that_ends_with_it(player, monkeypatch):
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.setenv("WANTED", "w")
    options = {"command": NOTES, "start_limit_s": 100.0}
    options |= {"variables": {"GIVEN": "g"}, "inherit": ["PATH", "WANTED", "NOT_THERE"]}
    one, two = await asyncio.gather(player(**options), player(**options))
    await one.tell("write_note", text="a")
    assert json.loads(await two.tell("count")) == {"notes": 0}
    names = set((await one.tell("variables")).split())
    assert {"PATH", "GIVEN", "WANTED"} <= names
    assert not {"SECRET", "HOME", "NOT_THERE"} & names
    pids = [int(await task.tell("pid")) for task in (one, two)]
    await one.end()
    assert [alive(pid) for pid in pids] == [False, True]
    status, problem = await two.client.call("POST", "/observation", says(two.task_id, two.turn, call("crash")))
    assert (status, problem["code"]) == (502, "environment_failed")
    assert "connection is closed" in problem["detail"]
    account = await two.end()
    assert (account["reward"], account["outcome"]["kind"]) == (None, "failed")


async def test_a_server_at_a_url_that_goes_away_fails_the_task(player, uvicorn_server):
    async with uvicorn_server(mcp_notes_server.build().streamable_http_app()) as url:
        task = await player(url=f"{url}/mcp", call_limit_s=5.0, reward_tool="grade")
    status, problem = await task.client.call("POST", "/observation", says(task.task_id, 0, call("count")))
    assert (status, problem["code"]) == (502, "environment_failed")


async def test_a_pause_leaves_the_server_as_it_is(player, notes_url):
    task = await player(url=notes_url)
    await task.tell("write_note", text="a")
    await task.client.call("POST", "/pause", {"task_id": task.task_id, "epoch": 1})
    await task.client.call("POST", "/resume", {"task_id": task.task_id, "epoch": 2})
    assert json.loads(await task.tell("count")) == {"notes": 1}


async def test_a_scoring_tool_gives_the_reward_and_is_not_the_models(player, notes_url):
    options = {"url": notes_url, "setup_tool": "prepare", "reward_tool": "grade", "final_tools": ["count"]}
    task = await player({"setup": {"first": "x"}}, **options)
    names = {one["function"]["name"] for one in task.started["tools"]}
    assert not {"prepare", "grade"} & names
    assert (await task.tell("grade")).startswith("error: there is no tool")
    answer = await task.say(call("write_note", '{"text": "y"}'), call("count", call_id="c2"), call("pid", call_id="c3"))
    assert [message["content"] for message in answer["messages"]][::2] == ["kept 2", "not_run"]
    assert (answer["terminated"], answer["reward"]) == (True, 1.0)
    assert (await task.end())["reward"] == 1.0


@pytest.mark.parametrize("leaves", ["by a message", "early", "at the bound"])
async def test_a_scoring_function_sees_the_task_and_all_messages_once(player, notes_url, tmp_path, monkeypatch, leaves):
    (tmp_path / "mcp_scores.py").write_text(
        "calls = []\n"
        "def score(task, messages):\n"
        "    calls.append(messages)\n"
        "    return float(task['answer'] in messages[-1]['content'])\n"
    )
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("mcp_scores", None)
    options = {"url": notes_url} | ({"max_turns": 1} if leaves == "at the bound" else {})
    task = await player({"answer": "kept 1"}, scoring="mcp_scores:score", **options)
    answer = await task.say(call("write_note", '{"text": "a"}'))
    assert answer["truncated"] is (leaves == "at the bound")
    if leaves == "by a message":
        answer = await task.say(content="It said: kept 1")
        assert (answer["terminated"], answer["reward"]) == (True, 1.0)
    assert (await task.end())["reward"] == 1.0
    (messages,) = sys.modules["mcp_scores"].calls
    assert [message["role"] for message in messages][:3] == ["user", "assistant", "tool"]


class Own(McpEnvironment):
    """Adds a tool and a score of its own."""

    @tool
    def hint(self, topic: str) -> str:
        """A hint."""
        return f"about {topic}: {len(self._messages)}"

    async def score(self, task, messages):
        return 0.25


async def test_a_subclass_adds_tools_and_scores(player, notes_url):
    task = await player(environment=Own, url=notes_url)
    assert "hint" in {one["function"]["name"] for one in task.started["tools"]}
    assert await task.tell("hint", topic="pens") == "about pens: 1"
    assert (await task.say(content="bye"))["reward"] == 0.25


async def test_tools_are_listed_page_by_page_and_an_error_with_a_bad_code_is_no_crash(player, paged_url):
    task = await player(url=paged_url, allowed=["tool 1", "tool 4"])
    assert [one["function"]["name"] for one in task.started["tools"]] == ["tool_1", "tool_4"]
    assert "the code of a closed connection" in await task.tell("tool_1")
    assert await task.tell("tool_4") == "tool 4"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"command": ""}, "give either command or url"),
        ({"command": "no-such-program --flag"}, "there is no program 'no-such-program --flag'"),
        ({"command": "", "url": "ftp://a"}, "is no http:// or https:// address"),
        ({"command": "", "url": "http://10.0.0.1/mcp", "token_variable": "PATH"}, "over https://"),
        ({"scoring": "nowhere:score"}, "scoring 'nowhere:score'"),
        ({"command": [sys.executable, "-c", "pass"]}, "MCP server"),
        ({"command": [sys.executable, "-c", "import time; time.sleep(60)"], "start_limit_s": 0.5}, "not ready within"),
    ],
)
async def test_what_cannot_work_says_why_at_the_start(asgi, options, told):
    client = asgi(EnvironmentServer(McpEnvironment, options={"command": NOTES, **options}))
    status, problem = await client.call("POST", "/start", {"environment": "e", "key": "k", "task": {"prompt": "x"}})
    assert (status, problem["code"]) == (502, "environment_failed")
    assert told in problem["detail"]


@pytest.mark.parametrize(
    ("task", "field"),
    [({}, "task.prompt"), ({"prompt": ""}, "task.prompt"), ({"prompt": "x", "setup": {"first": "bad"}}, "task.setup")],
)
async def test_bad_task_parameters_are_named(asgi, notes_url, task, field):
    client = asgi(EnvironmentServer(McpEnvironment, options={"url": notes_url, "setup_tool": "prepare"}))
    status, problem = await client.call("POST", "/start", {"environment": "e", "key": "k", "task": task})
    assert (status, problem["field"]) == (422, field)


async def gone(pids: list[int]) -> bool:
    """True once all of them are dead; a killed process may take a moment."""
    for _ in range(600):
        if not any(map(alive, pids)):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_a_server_that_ignores_every_request_to_end_is_killed_with_its_children(tmp_path):
    file = tmp_path / "pids"
    environment = McpEnvironment(command=[*NOTES, "--stubborn", str(file)], start_limit_s=100.0)
    try:
        await environment.start(StartInfo({"prompt": "x"}))
    finally:
        await environment.end("ended")
    assert await gone([int(pid) for pid in file.read_text().split()])


@pytest.mark.timeout(300)  # two processes, each with imports of seconds on a busy machine
async def test_nothing_outlives_an_environment_server_that_is_killed(tmp_path):
    file, address = tmp_path / "pids", tmp_path / "address"
    command = json.dumps([*NOTES, "--stubborn", str(file)])
    target = "tide_sdk.mcp_environment:McpEnvironment"
    words = ["-m", "tide_sdk.cli", "serve", target, "--set", f"command={command}", "--announce", str(address)]
    words += ["--set", "start_limit_s=100"]
    server = await asyncio.create_subprocess_exec(sys.executable, *words)
    try:
        while not address.exists():
            assert server.returncode is None
            await asyncio.sleep(0.05)
        async with GatewayClient(json.loads(address.read_text())["url"]) as client:
            started = await client.start("mcp", "k", task={"prompt": "x"})
            observed = await client.observe(
                started.task_id, 0, says("", 0, call("write_note", '{"text": "a"}'))["message"]
            )
        assert observed.messages[0].content == "kept 1"
        pids = [int(pid) for pid in file.read_text().split()]
        assert all(map(alive, pids))
    finally:
        server.kill()
        await server.wait()
    assert await gone(pids)
