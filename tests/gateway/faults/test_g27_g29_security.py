"""Other owners' tasks, keys that are not guessed and not shown, images that do not fit, gateways in containers."""

from __future__ import annotations

import asyncio
import hmac
import random
import re
import secrets
import time
from pathlib import Path

import pytest
from docker_engine import OTHER_IMAGE, docker_spec, shared_engine
from fault_clusters import wait_until
from gateway_cluster import GatewayCluster, scripted
from load_driver import Load, drive

from tide_gateway.auth import Owners
from tide_gateway.keys import KeyStore
from tide_gateway.roles import Caller
from tide_gateway.runtimes.docker_container import container_config
from tide_gateway.runtimes.docker_ways import Ways, url_host
from tide_gateway.specs import DockerOptions
from tide_sdk.errors import TideError

GO = {"role": "assistant", "content": "go"}
ANN, BOB = "ann-token-0123456789abcdef", "bob-token-0123456789abcdef"
TOKENS = {"TIDE_GATEWAY_TOKENS": f"ann:{ANN},bob:{BOB}"}


@pytest.fixture
def cluster(tmp_path):
    tables = {"scripted": scripted()}
    options = ["--log-level", "debug"]
    with GatewayCluster(
        tmp_path, f"sqlite:///{tmp_path / 'gateway.db'}", tables, environ=TOKENS, token=ANN, options=options
    ) as cluster:
        yield cluster.start_all()


def test_g27_every_call_on_a_task_hides_it_from_other_owners(cluster):
    """The calls are those of the published document, so that a new one is tried too. Large bodies are files."""
    with cluster.client(token=ANN) as ann, cluster.client(token=BOB) as bob:
        body = {"environment": "scripted", "key": "k", "task": {"text_bytes": 100_000}}
        task_id = ann.post("/start", json=body).json()["task_id"]
        action = {"turn": 0, "message": GO, "epoch": 1}
        ann.post("/observation", json={"task_id": task_id, "turn": 0, "message": GO}).raise_for_status()
        tried = set()
        for path, calls in ann.get("/openapi.json").json()["paths"].items():
            for method in calls:
                words = {"params": {"task_id": task_id}} if method == "get" else {"json": action | {"task_id": task_id}}
                if "{task_id}" not in path and path not in ("/observation", "/pause", "/resume", "/end"):
                    continue
                if path in ("/pause", "/resume"):
                    words["json"].pop("turn"), words["json"].pop("message")
                if path == "/end":
                    words["json"] = {"task_id": task_id}
                if path == "/observation" and method == "post":
                    words["json"].pop("epoch")
                answer = bob.request(method, path.replace("{task_id}", task_id), **words)
                # Word for word what is said of a task that never was: nothing tells that it is there.
                same = bob.request(
                    method, path.replace("{task_id}", "0" * len(task_id)), **about_nothing(words, task_id)
                )
                assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), (method, path)
                assert answer.text.replace(task_id, "") == same.text.replace("0" * len(task_id), "")
                tried.add((method, path))
        assert {path for _, path in tried} >= {
            "/observation", "/pause", "/resume", "/end", "/tasks/{task_id}", "/tasks/{task_id}/events",
        }  # fmt: skip
        assert bob.get("/tasks").json()["tasks"] == []
        # A key is its owner's: the same one is another task, with nothing of the first.
        assert bob.post("/start", json=body).json()["task_id"] != task_id
        assert ann.get(f"/tasks/{task_id}").json()["state"] == "waiting"


def about_nothing(words: dict, task_id: str) -> dict:
    """The same request for a task that never was."""
    return {kind: values | {"task_id": "0" * len(task_id)} for kind, values in words.items()}


async def test_g28_a_whole_run_writes_no_token_anywhere(cluster, tmp_path):
    """Logs of the gateway at its most talkative and of its servers, their variables, and every command line."""
    report = await drive(cluster.urls, Load(tasks=4, turns=2, repeat=0.3, pause=0.3), token=ANN)
    assert report.finished == 4, str(report)

    def wrong_ways() -> None:
        for token in (f"{ANN}x", "tide_01234567_" + "S" * 43, ANN):
            with cluster.client(token=token) as client:
                for path in ("/tasks", f"/{token}", f"/tasks/{token}", f"/tasks?after={token}&limit=x"):
                    client.get(path)
                client.post("/start", json={"environment": "scripted", "key": "k", "task": {"refuse": True}})
                client.post("/start", content=b"{")

    await asyncio.to_thread(wrong_ways)
    servers = [pid for server in cluster.servers() for pid in server.pids]
    assert servers
    seen = [*(Path(f"/proc/{pid}/environ") for pid in servers), Path(f"/proc/{cluster.pid()}/cmdline")]
    seen += [Path(f"/proc/{pid}/cmdline") for pid in servers]
    assert not any(ANN.encode() in path.read_bytes() for path in seen)
    assert await asyncio.to_thread(cluster.stop) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".log" for path in files)
    shown = [path.name for path in files if ANN.encode() in path.read_bytes() or b"S" * 43 in path.read_bytes()]
    # Its log notes neither calls nor their paths.
    assert shown == []


async def test_g28_keys_are_random_and_compared_in_constant_time(bench, monkeypatch):
    store = KeyStore(bench.database)
    texts = []
    for _ in range(20):
        random.seed(0)  # what a guessable generator would repeat
        texts.append((await store.create("ann", "agent"))[0])
    found = [re.fullmatch(r"tide_([0-9a-f]{8})_([A-Za-z0-9_-]{43})", text) for text in texts]
    assert all(found)
    assert len({match[2] for match in found if match}) == len({match[1] for match in found if match}) == 20

    lengths: list[tuple[int, int]] = []
    honest = hmac.compare_digest

    def noting(one, other) -> bool:
        lengths.append((len(one), len(other)))
        return honest(one, other)

    monkeypatch.setattr(secrets, "compare_digest", noting)
    monkeypatch.setattr(hmac, "compare_digest", noting)
    owners = Owners({ANN: Caller("ann", "agent"), BOB: Caller("bob", "agent")}, store)
    good = texts[0]
    wrong = [
        good[:-1] + ("A" if good[-1] != "A" else "B"),
        good[:14] + "!" + good[15:],
        good[:-5],
        f"{ANN}x",
        "x" * 500,
    ]
    await owners.caller(f"Bearer {good}".encode())
    for text in wrong:
        lengths.clear()
        with pytest.raises(TideError, match="unauthorized"):
            await owners.caller(f"Bearer {text}".encode())
        # Every static token and one key, or twice the key where the table was read again; digests, never the texts.
        assert len(lengths) in (3, 4)
        assert set(lengths) == {(32, 32)}
    lengths.clear()
    assert (await owners.caller(f"Bearer {ANN}".encode())).owner == "ann"
    assert len(lengths) == 2, "the first one that fits ends nothing"


@pytest.mark.docker
async def test_g29_an_image_of_another_architecture_is_refused_before_anything_is_started(tmp_path):
    engine = shared_engine()
    spec = docker_spec(docker={"image": OTHER_IMAGE})
    tables = {"scripted": spec.model_dump(mode="json", exclude={"name"}, exclude_unset=True)}
    before = await asyncio.to_thread(created_of, engine)
    with GatewayCluster(tmp_path, f"sqlite:///{tmp_path / 'gateway.db'}", tables) as cluster:
        await asyncio.to_thread(cluster.start_all)
        with cluster.client() as client:
            answer = client.post("/start", json={"environment": "scripted", "key": "k", "task": {}})
            problem = answer.json()
            assert (answer.status_code, problem["code"]) == (502, "environment_failed")
            assert re.search(r"built for linux/s390x, but the engine .* wants linux/", problem["detail"])
            assert OTHER_IMAGE in problem["detail"]
            wait_until(lambda: client.get("/capacity").json()["scripted"]["taken"] == 0, "the slot is free")
    assert await asyncio.to_thread(created_of, engine) == before


def created_of(engine) -> int:
    """Containers that the engine ever made for the environment, those that are gone too."""
    events = engine.client().events(
        filters={"type": "container", "event": "create"}, since=0, until=int(time.time()) + 1, decode=True
    )
    return sum(1 for _ in events)


class Elsewhere:
    """An engine as a gateway in a container has it: the host's, over its socket or over TCP."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_local = url.startswith("unix:")


@pytest.mark.parametrize(
    ("address", "published", "reached"),
    [
        ("172.17.0.1", "172.17.0.1", "172.17.0.1"),  # the host as seen from a container of its bridge
        ("host.docker.internal", "0.0.0.0", "host.docker.internal"),
        ("fd00::1", "fd00::1", "fd00::1"),
    ],
)
@pytest.mark.parametrize("url", ["unix:///var/run/docker.sock", "tcp://engine:2375"])
async def test_g29_a_gateway_in_a_container_is_told_where_ports_are_reached(tmp_path, url, address, published, reached):
    spec = docker_spec(
        Elsewhere(url), command=("serve", "--port", "{port}"),
        docker={"connect": "bridge", "address": address, "port": 9000, "network": "mine"},
    )  # fmt: skip
    options, engine = spec.docker, Elsewhere(url)
    assert isinstance(options, DockerOptions)
    way = await Ways("abc", tmp_path).make(engine, "scripted-1", options)
    config = container_config("abc", "scripted-1", spec, options, way)
    assert config["HostConfig"]["PortBindings"] == {"9000/tcp": [{"HostIp": published, "HostPort": ""}]}
    assert config["HostConfig"]["NetworkMode"] == "mine"
    assert "TIDE_PORT=9000" in config["Env"]
    assert url_host(engine, options) == reached
