"""Servers that somebody else runs: found again by their incarnation, and called with their token."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import ValidationError
from remote_peer import HEALTH, Peer, spec_of

from tide_gateway.runtimes import Gone, LaunchFailed, Place, RuntimeAway
from tide_gateway.runtimes.remote import RemoteRuntime
from tide_gateway.specs import RemoteUrl
from tide_sdk.http import ConnectFailed, ProtocolFailed


@pytest.fixture
async def peer():
    async with Peer().serve() as running:
        yield running


@pytest.fixture
async def runtime():
    runtime = RemoteRuntime()
    yield runtime
    await runtime.close()


async def test_each_slot_is_one_url_and_its_place_is_found_again(peer, runtime):
    async with Peer().serve() as second:
        second.health["incarnation"] = "second"
        spec = spec_of(f"http://127.0.0.1:{peer.port}", f"http://localhost:{second.port}/prefix/")
        servers = [await runtime.launch(f"far-{slot}", slot, spec, 5.0) for slot in (0, 1)]
        assert [server.place.handle for server in servers] == ["first", "second"]
        assert servers[1].place.host == "localhost"
        assert "GET /prefix/health HTTP/1.1" in second.heads[0]
        assert f"Host: localhost:{second.port}\r\n" in second.heads[0]

        again = RemoteRuntime()
        place = Place.loads(servers[1].place.dumps())
        attached = await again.attach("far-1", spec, place, 5.0)
        assert (attached.health.incarnation, attached.place) == ("second", place)
        await again.destroy("far-1", None, None, 1.0)
        assert attached.exited.is_set()
        with pytest.raises(ConnectFailed):
            await attached.channel.request("GET", "/health")
        assert not servers[1].exited.is_set()
        assert (await servers[1].channel.request("GET", "/health")).status == 200  # it lives on
    assert await runtime.survey() == set()
    with pytest.raises(LaunchFailed, match=r"slot 2: remote\.urls names 2 servers"):
        await runtime.launch("far-2", 2, spec, 5.0)


async def test_another_incarnation_or_a_url_that_was_taken_out_is_gone(peer, runtime):
    spec = spec_of(f"http://127.0.0.1:{peer.port}")
    place = (await runtime.launch("far", 0, spec, 5.0)).place
    peer.health["incarnation"] = "other"
    with pytest.raises(Gone, match="another incarnation"):
        await runtime.attach("far", spec, place, 5.0)
    with pytest.raises(Gone, match=r"not in remote\.urls any more"):
        await runtime.attach("far", spec_of("http://127.0.0.1:1"), place, 5.0)


async def test_both_wait_for_a_server_that_is_not_there_yet(runtime):
    peer = Peer()
    async with peer.serve():
        pass  # it has a port now, and nobody listens on it
    spec = spec_of(f"http://127.0.0.1:{peer.port}")
    with pytest.raises(LaunchFailed, match=r"not healthy within 0\.2 s: .*cannot connect"):
        await runtime.launch("far", 0, spec, 0.2)
    with pytest.raises(Gone, match=r"not healthy within 0\.2 s"):
        await runtime.attach("far", spec, Place(spec.remote.urls[0], handle="first"), 0.2)
    launching = asyncio.create_task(runtime.launch("far", 0, spec, 20.0))
    await asyncio.sleep(0)
    async with peer.serve():
        assert (await launching).health.incarnation == "first"


async def test_a_restarted_server_has_exited_and_one_that_refuses_for_a_moment_has_not(peer, eventually):
    runtime = RemoteRuntime(refused_s=1.0)
    peer.extra = "Connection: close\r\n"
    spec = spec_of(f"http://127.0.0.1:{peer.port}", probe_interval_s=0.02)
    server = await runtime.launch("far", 0, spec, 5.0)
    peer.pause()
    with pytest.raises(ConnectFailed):
        await server.channel.request("GET", "/health")
    await peer.go_on()
    seen = len(peer.heads)
    await eventually(lambda: len(peer.heads) > seen + 2, "it is asked again")
    assert not server.exited.is_set()
    peer.health["incarnation"] = "second"
    await eventually(server.exited.is_set, "the other incarnation is seen")

    server = await runtime.launch("far-again", 0, spec, 5.0)
    peer.pause()
    await eventually(server.exited.is_set, "it refused for too long")
    await peer.go_on()
    await runtime.close()


@pytest.mark.parametrize(
    ("status", "extra", "health", "told"),
    [
        (302, "Location: http://169.254.169.254/\r\n", HEALTH, "redirect"),
        (307, "Location: /elsewhere\r\n", HEALTH, "redirect"),
        (403, "", HEALTH, "refuses the token"),
        (200, "", {"hello": "secret-words"}, "not the contract's"),
        (200, "", HEALTH | {"contract": 99}, "speaks contract 99"),
    ],
)
async def test_a_wrong_answer_fails_the_launch_at_once(peer, runtime, status, extra, health, told):
    peer.status, peer.extra, peer.health = status, extra, health
    with pytest.raises(LaunchFailed, match=told) as caught:
        await runtime.launch("far", 0, spec_of(f"http://127.0.0.1:{peer.port}"), 60.0)
    assert len(peer.heads) == 1
    assert "secret-words" not in str(caught.value)


async def test_answers_are_bounded(peer):
    runtime = RemoteRuntime(max_body_bytes=4096)
    server = await runtime.launch("far", 0, spec_of(f"http://127.0.0.1:{peer.port}"), 5.0)
    peer.health["environment"] = "x" * 5000
    with pytest.raises(ProtocolFailed, match="larger than 4096 bytes"):
        await server.channel.request("GET", "/health")
    await runtime.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://user:hunter2@far.test", "user name or password"),
        ("http://hunter2@far.test", "user name or password"),
        *(
            (f"http://far.test{rest}", "expected")
            for rest in ("?q=1", "#f", ":0", ":65536", ":-1", ":x", "\\a", " ", "%")
        ),
        *(
            (url, "expected")
            for url in ("ftp://a", "file:///etc/passwd", "unix:/run/a", "http://", "//a", "a", "gopher://a")
        ),
        ("http://[fe80::1%25eth0]", "expected"),
        ("http://far.test\r\nX: y", "expected"),
    ],
)
def test_a_url_that_is_more_than_a_server_is_refused_when_it_is_read(url, told):
    with pytest.raises(ValidationError, match=told) as caught:
        spec_of(url)
    assert caught.value.errors(include_input=False)[0]["loc"] == ("remote", "urls")
    assert "hunter2" not in caught.value.errors(include_input=False)[0]["msg"]


def test_one_server_twice_is_refused_when_it_is_read():
    with pytest.raises(ValidationError, match="each server once"):
        spec_of("http://a", "http://a")
    assert RemoteUrl.parse("https://A.test/x/") == RemoteUrl("https", "a.test", 443, "/x")


async def test_the_token_is_sent_read_again_and_never_shown(peer, runtime, tmp_path, caplog):
    caplog.set_level(0)
    file = tmp_path / "token"
    file.write_text("old-secret\n")
    peer.token = "old-secret"
    spec = spec_of(f"http://127.0.0.1:{peer.port}", token_file=str(file))
    server = await runtime.launch("far", 0, spec, 5.0)
    peer.token = "new-secret"
    assert (await server.channel.request("GET", "/health")).status == 401
    file.write_text("new-secret\n")
    assert (await server.channel.request("GET", "/health")).status == 200
    seen = len(peer.heads)
    assert (await server.channel.request("GET", "/health")).status == 200
    assert len(peer.heads) == seen + 1

    peer.token = "third-secret"
    with pytest.raises(LaunchFailed, match=r"refuses the token of remote\.token_file") as caught:
        await runtime.launch("far", 0, spec, 5.0)
    shown = [repr(server), repr(server.channel), server.place.dumps(), str(caught.value), repr(spec), caplog.text]
    assert not any("secret" in text.replace("_secret", "") for text in shown)


@pytest.mark.parametrize("content", [None, "", "two words", "two\nlines", "x" * 9000, "b\x00d"])
async def test_a_token_file_that_cannot_be_used_is_named(peer, runtime, tmp_path, content):
    file = tmp_path / "far.token"
    if content is not None:
        file.write_text(content)
    spec = spec_of(f"http://127.0.0.1:{peer.port}", token_file=str(file))
    with pytest.raises(LaunchFailed, match=r"remote\.token_file: .*far\.token") as caught:
        await runtime.launch("far", 0, spec, 60.0)
    assert not content or content not in str(caught.value)
    assert peer.connections == 0


async def test_the_runtime_is_away_while_no_registered_server_answers(peer):
    async with Peer().serve() as second:
        spec = spec_of(f"http://127.0.0.1:{peer.port}", f"http://127.0.0.1:{second.port}")
        runtime = RemoteRuntime([spec])
        assert await runtime.survey() == set()
        second.kill()
        assert await runtime.survey() == set(), "one of two is enough"
        peer.status = 503
        with pytest.raises(RuntimeAway):
            await runtime.survey()
        peer.status = 200
        await runtime.launch("far", 0, spec, 5.0)
        num_asked = len(peer.heads)
        assert (await runtime.survey(), len(peer.heads)) == (set(), num_asked), "it is watched already"
        await runtime.close()
