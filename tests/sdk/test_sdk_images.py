"""Images in the SDK: parts, the window, bytes behind references, and what goes out to which kind of model server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_servers import Blobs, FakeServer
from screenshot_environment import Screenshots, shown

from tide_sdk import codec
from tide_sdk.agents import Agent
from tide_sdk.client import GatewayClient
from tide_sdk.context_images import without_bytes
from tide_sdk.errors import TideError
from tide_sdk.http import Disconnected, ProtocolFailed
from tide_sdk.http_parse import Response
from tide_sdk.image_cache import ImageCache
from tide_sdk.image_window import ImageWindow
from tide_sdk.images import (
    MAX_IMAGE_BYTES,
    ImageRef,
    ImageUnknown,
    data_url,
    digest_of,
    image,
    image_urls,
    media_type_of,
    read_data_url,
    read_reference,
)
from tide_sdk.model import ModelEndpoint
from tide_sdk.outcomes import TaskSpec
from tide_sdk.runner import run_task
from tide_sdk.server import EnvironmentServer

PNG = b"\x89PNG\r\n\x1a\n"
KINDS = {
    "image/png": PNG + b"x",
    "image/jpeg": b"\xff\xd8\xff\xe0x",
    "image/gif": b"GIF89ax",
    "image/webp": b"RIFF\0\0\0\0WEBPx",
}


def turn(number: int, num_images: int = 1) -> dict:
    parts = [{"type": "text", "text": f"turn {number}"}]
    return {"role": "user", "content": parts + [image(PNG + b"%d.%d" % (number, i)) for i in range(num_images)]}


def shown_in(messages: list[dict]) -> list[bytes]:
    return [(read_data_url(url) or b"").removeprefix(PNG) for url in image_urls(messages)]


@pytest.mark.parametrize(("kind", "data"), KINDS.items())
def test_a_part_holds_the_image_and_says_what_it_is(kind, data):
    part = image(data, kind, detail="low")
    assert part == {"type": "image_url", "image_url": {"url": data_url(data, kind), "detail": "low"}}
    assert (media_type_of(data), read_data_url(part["image_url"]["url"])) == (kind, data)
    with pytest.raises(ValueError, match=f"the bytes are {kind}"):
        image(data, "image/other")


def test_what_is_no_image_or_too_large_is_refused_where_it_is_made():
    with pytest.raises(ValueError, match="no PNG, JPEG, WebP or GIF"):
        image(b"<svg/>")
    with pytest.raises(ValueError, match="at most"):
        image(PNG.ljust(MAX_IMAGE_BYTES + 1, b"\0"))


@given(st.binary(max_size=50), st.sampled_from(sorted(KINDS)))
def test_a_data_url_that_is_read_is_written_the_same(data, kind):
    whole = KINDS[kind] + data
    url = data_url(whole, kind)
    assert read_data_url(url) == whole
    ref = ImageRef(digest_of(whole), kind)
    assert read_reference(ref.url) == ref
    assert read_reference(url) is None
    assert read_data_url(ref.url) is None


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(2, 12), st.data())
def test_the_window_holds_its_bounds_and_requests_only_grow_between_prunings(counts, max_images, data):
    keep = data.draw(st.integers(1, max_images - 1))
    window = ImageWindow(max_images, keep)
    messages, before, num_prunings = [], [], 0
    for number, count in enumerate(counts):
        messages.append(turn(number, count))
        pruned = window.prune(messages)
        every, left = shown_in(messages), shown_in(pruned)
        assert left == every[len(every) - len(left) :], "the newest ones stay"
        assert min(len(every), keep) <= len(left) < max_images
        assert window.prune(pruned) == pruned
        assert [message["content"][0] for message in pruned] == [message["content"][0] for message in messages]
        num_prunings += pruned[: len(before)] != before
        before = pruned
    assert num_prunings <= max(0, sum(counts) - keep) // (max_images - keep)


def test_a_pruned_image_leaves_its_note_or_nothing_and_never_an_empty_message():
    messages = [turn(0), {"role": "user", "content": [image(PNG + b"alone")]}, turn(2)]
    noted = ImageWindow(2, 1, note="(gone)").prune(messages)
    assert noted[0]["content"][1] == {"type": "text", "text": "(gone)"}
    assert noted[1]["content"] == [{"type": "text", "text": "(gone)"}]
    silent = ImageWindow(2, 1, note="").prune(messages)
    assert (silent[0]["content"], silent[1]["content"]) == ([{"type": "text", "text": "turn 0"}], "")
    assert shown_in(messages) == [b"0.0", b"alone", b"2.0"], "the conversation itself is left as it is"


@pytest.mark.parametrize(("max_images", "keep"), [(10, 10), (10, 0), (1, 1), (5, 9)])
def test_a_window_whose_numbers_do_not_fit_is_refused(max_images, keep):
    with pytest.raises(ValueError, match="keep"):
        ImageWindow(max_images, keep)


def test_the_cache_is_bounded_and_gives_up_what_was_not_used():
    cache = ImageCache(100)
    for name in "abc":
        cache.put(name, bytes(40))
        cache.get("a")
    assert [cache.get(name) is None for name in "abc"] == [False, True, False]
    cache.put("huge", bytes(101))
    cache.put("a", bytes(40))
    assert (cache.get("huge"), cache.num_bytes) == (None, 80)


async def test_a_blob_is_read_again_until_it_is_the_one_and_then_kept(clock):
    data = KINDS["image/png"]
    http = Blobs(Disconnected("x"), (503, {"detail": "busy"}), data[:-1], data)
    client = GatewayClient("http://g", http=http, now=clock, sleep=clock.sleep)
    assert await client.blob(digest_of(data)) == data
    assert await client.blob(digest_of(data)) == data
    assert http.paths == [f"/blobs/{digest_of(data)}"] * 4


async def test_other_bytes_for_ever_are_an_error_and_so_is_what_is_no_digest(clock):
    client = GatewayClient("http://g", http=Blobs(b"other"), now=clock, sleep=clock.sleep, deadline_s=3.0)
    with pytest.raises(ProtocolFailed, match="not image"):
        await client.blob("0" * 64)
    with pytest.raises(ValueError, match="digest"):
        await client.blob("../keys")
    refused = TideError("not_found", "none")
    gone = GatewayClient("http://g", http=Blobs((404, refused.problem().model_dump())), now=clock, sleep=clock.sleep)
    with pytest.raises(TideError) as missing:
        await gone.blob("0" * 64)
    assert missing.value.code == "not_found"


@pytest.fixture
def play(asgi, clock):
    """Play a task of screenshots at an environment server alone: (result, the model's server, the context)."""

    async def run(player=None, *, turns: int = 3, references: bool = False, server: FakeServer | None = None):
        server = server or FakeServer()
        gateway = GatewayClient("http://g", http=asgi(EnvironmentServer(Screenshots)))
        endpoint = ModelEndpoint(
            "http://m/v1", api_key="key", http=server, image_references=references, sleep=clock.sleep
        )
        contexts = []

        async def agent(ctx):
            contexts.append(ctx)
            if player is not None:
                return await player(ctx)
            while not ctx.done:
                await ctx.step(await ctx.generate())
            return None

        spec = TaskSpec("screens", "k", task={"turns": turns}, seed=3)
        return await run_task(Agent("test:play", agent), spec, gateway, endpoint), server, contexts[0]

    return run


def pictures(num: int) -> list[bytes]:
    return [shown(3, number, 64, 48, 0) for number in range(num)]


async def test_messages_refer_to_images_and_a_foreign_server_gets_them_inline(play):
    result, server, ctx = await play()
    assert (result.outcome, result.reward) == ("completed", 1.0)
    refs = [read_reference(url) for url in image_urls(ctx.messages)]
    assert [ref.digest for ref in refs if ref] == [digest_of(data) for data in pictures(4)]
    assert [[read_data_url(url) for url in image_urls(chat)] for chat in server.chats] == [
        pictures(1), pictures(2), pictures(3),
    ]  # fmt: skip
    assert server.puts == []


async def test_a_router_gets_each_image_once_and_references_after_that(play):
    server = FakeServer()
    server.lose = 1
    result, server, _ = await play(references=True, server=server)
    assert result.outcome == "completed"
    assert server.images == {digest_of(data): data for data in pictures(4)}, "the last one is for the record"
    assert server.puts[0] == server.puts[1], "a lost answer is asked for again"
    assert len(server.puts) == 5
    for number, chat in enumerate(server.chats):
        assert [read_reference(url).digest for url in image_urls(chat)] == [digest_of(d) for d in pictures(number + 1)]


async def test_a_model_without_images_fails_only_the_agent_that_shows_it_some(play):
    class Blind(FakeServer):
        async def request(self, method, path, body=None, **options):
            if method == "PUT":
                self.puts.append(path)
                error = {"code": "images_unsupported", "message": "this model takes no images"}
                return Response(400, {}, codec.dumps({"error": error}))
            return await super().request(method, path, body, **options)

    async def words_only(ctx):
        while not ctx.done:
            await ctx.step("x")

    result, server, _ = await play(words_only, references=True, server=Blind())
    assert (result.outcome, len(server.puts)) == ("completed", 1)
    result, _, _ = await play(references=True, server=Blind())
    assert result.outcome == "agent_error"
    assert "takes no images" in result.error


async def test_the_default_window_bounds_what_is_sent_and_an_agent_may_set_another(play):
    async def narrow(ctx):
        ctx.images.window = ImageWindow(3, 1)
        while not ctx.done:
            await ctx.step(await ctx.generate())

    async def wide(ctx):
        ctx.images.window = None
        while not ctx.done:
            await ctx.step(await ctx.generate())

    sizes = []
    for player in (None, narrow, wide):
        _, server, _ = await play(player, turns=12)
        sizes.append([len(list(image_urls(chat))) for chat in server.chats])
    assert sizes == [
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 6, 7],
        [1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2],
        list(range(1, 13)),
    ]


async def test_an_agent_reads_the_bytes_of_what_is_shown_and_of_its_own(play):
    seen = []

    async def look(ctx):
        while not ctx.done:
            part = ctx.messages[-1]["content"][1]
            seen.append(await ctx.images.read(part))
            await ctx.step("x")
            await ctx.sendable_messages()
        own = image(KINDS["image/gif"])
        assert await ctx.images.read(own) == KINDS["image/gif"]
        for part in ({"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "https://a/b.png"}}):
            with pytest.raises(ValueError, match="image"):
                await ctx.images.read(part)
        with pytest.raises(ImageUnknown, match="not kept"):
            await ctx.images.read(ctx.messages[0]["content"][1])

    result, _, _ = await play(look, turns=12)
    assert (result.outcome, result.error) == ("completed", None)
    assert seen == pictures(12)


def test_a_record_names_the_images_that_an_agent_put_in_itself():
    data = KINDS["image/png"]
    messages = [{"role": "user", "content": [image(data), {"type": "text", "text": "mine"}]}, {"role": "user"}]
    record = without_bytes(messages)
    assert record[0]["content"][0]["image_url"]["url"] == ImageRef(digest_of(data), "image/png").url
    assert (record[0]["content"][1], record[1]) == ({"type": "text", "text": "mine"}, {"role": "user"})
    assert shown_in(messages) == [b"x"], "the agent's own messages are left as they are"


@pytest.mark.parametrize("left", [None, "words", {"role": "user"}, ["words", None, 3]])
def test_whatever_an_agent_leaves_as_its_conversation_has_a_record(left):
    assert without_bytes(left) == (left if isinstance(left, list) else [])
