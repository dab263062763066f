"""Three roles over HTTP: what each may do, owner isolation, strange web pages, and that no secret leaks."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field

import httpx
import pytest

from tide_gateway.app import GatewayApp
from tide_gateway.auth import Owners
from tide_gateway.keys import KeyStore

GO = {"role": "assistant", "content": "go"}


@dataclass
class Site:
    """A gateway in this process, and a client for each role."""

    app: GatewayApp
    owners: Owners
    store: KeyStore
    texts: dict[str, str] = field(default_factory=dict)

    def client(self, key: str | None = None, **headers: str) -> httpx.AsyncClient:
        if key is not None:
            headers["Authorization"] = f"Bearer {self.texts.get(key, key)}"
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


@pytest.fixture
async def site(bench, tmp_path) -> Site:
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "secret.log").write_text("not for you")
    store = KeyStore(bench.database)
    owners = Owners({}, store)
    return Site(GatewayApp(bench.service, owners, logs), owners, store)


@pytest.fixture
async def keyed(site) -> Site:
    for owner, role in (("ann", "agent"), ("bob", "agent"), ("carl", "author"), ("olga", "operator")):
        site.texts[owner], _ = await site.store.create(owner, role)
    return site


def code(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["code"]


async def start(client: httpx.AsyncClient, key: str = "k") -> str:
    answer = await client.post("/start", json={"environment": "scripted", "key": key, "task": {}})
    assert answer.status_code == 201, answer.text
    return answer.json()["task_id"]


async def test_g27_an_agent_sees_its_own_tasks_only(keyed):
    async with keyed.client("ann") as ann, keyed.client("bob") as bob, keyed.client("carl") as carl:
        task_id = await start(ann)
        for other in (bob, carl):
            for answer in (
                await other.get(f"/tasks/{task_id}"),
                await other.get(f"/tasks/{task_id}/events"),
                await other.get("/observation", params={"task_id": task_id}),
                await other.post("/observation", json={"task_id": task_id, "turn": 0, "message": GO}),
                await other.post("/pause", json={"task_id": task_id}),
                await other.post("/resume", json={"task_id": task_id}),
                await other.post("/end", json={"task_id": task_id}),
            ):
                assert code(answer) == (404, "not_found")
            assert (await other.get("/tasks")).json()["tasks"] == []
            assert code(await other.get("/tasks", params={"owner": "ann"})) == (403, "forbidden")
        assert [task["task_id"] for task in (await ann.get("/tasks", params={"owner": "ann"})).json()["tasks"]] == [
            task_id
        ]
        assert (await ann.get("/capacity")).status_code == 200
        (environment,) = (await ann.get("/environments")).json()
        assert environment["servers"] is None
        for method, path in (("GET", "/keys"), ("POST", "/keys"), ("DELETE", "/keys/00000000"), ("GET", "/owners"),
                             ("PUT", "/owners/ann"), ("GET", "/environments/scripted/servers/x/log")):  # fmt: skip
            answer = await ann.request(method, path)
            assert code(answer) == (403, "forbidden")
            assert answer.json()["role"] in ("author", "operator")
        assert (await ann.post("/end", json={"task_id": task_id})).status_code == 200


async def test_an_author_reads_the_logs_of_known_servers_only(keyed, bench, tmp_path):
    async with keyed.client("carl") as carl:
        await start(carl)
        (environment,) = (await carl.get("/environments")).json()
        name = environment["servers"][0]["name"]
        path = f"/environments/scripted/servers/{name}/log"
        assert code(await carl.get(path)) == (404, "not_found")
        (tmp_path / "logs" / f"{name}.log").write_bytes(b"0123456789\n" * 10_000)
        answer = await carl.get(path, params={"tail_bytes": 11})
        assert (answer.status_code, answer.text) == (200, "0123456789\n")
        assert answer.headers["content-type"].startswith("text/plain")
        assert len((await carl.get(path)).content) == 65536
        for bad in ("0", "1048577", "x"):
            assert code(await carl.get(path, params={"tail_bytes": bad})) == (422, "invalid")
        for stranger in ("unknown", "..%2Fsecret", "../secret", "%2e%2e%2fsecret", ".", "secret%00", "a" * 200):
            answer = await carl.get(f"/environments/scripted/servers/{stranger}/log")
            assert answer.status_code in (404, 422), stranger
            assert "not for you" not in answer.text
        assert code(await carl.get(f"/environments/nope/servers/{name}/log")) == (404, "environment_unknown")
        (tmp_path / "logs" / f"{name}.log").unlink()
        (tmp_path / "logs" / f"{name}.log").symlink_to(tmp_path / "secret.log")
        assert code(await carl.get(path)) == (404, "not_found")
        for method, target in (("GET", "/keys"), ("PUT", "/owners/ann")):
            assert code(await carl.request(method, target)) == (403, "forbidden")


async def test_an_operator_reads_pauses_and_ends_everyones_tasks_but_does_not_act_in_them(keyed):
    async with keyed.client("ann") as ann, keyed.client("olga") as olga:
        task_id = await start(ann)
        tasks = (await olga.get("/tasks", params={"owner": "ann"})).json()["tasks"]
        assert [task["task_id"] for task in tasks] == [task_id]
        assert (await olga.get(f"/tasks/{task_id}")).json()["task_id"] == task_id
        assert len((await olga.get(f"/tasks/{task_id}/events")).json()) == 2
        assert (await olga.get("/observation", params={"task_id": task_id})).status_code == 200
        assert (await olga.post("/pause", json={"task_id": task_id})).json()["state"] == "paused"
        assert (await olga.post("/resume", json={"task_id": task_id})).json()["state"] == "waiting"
        action = {"task_id": task_id, "turn": 0, "message": GO}
        assert code(await olga.post("/observation", json=action)) == (404, "not_found")
        assert (await olga.post("/end", json={"task_id": task_id})).json()["outcome"]["kind"] == "aborted"
        assert code(await ann.post("/observation", json=action)) == (410, "ended")
        assert code(await olga.post("/end", json={"task_id": "nope"})) == (404, "not_found")


async def test_keys_and_owners_over_http(keyed):
    async with keyed.client("olga") as olga:
        answer = await olga.post("/keys", json={"owner": "dora", "label": "ci", "expires_days": 1})
        assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
        made = answer.json()
        assert (made["role"], made["expires_s"] - made["created_s"]) == ("agent", 86400.0)
        async with keyed.client(made["key"]) as dora:
            assert (await dora.get("/tasks")).status_code == 200
            revoked = (await olga.delete(f"/keys/{made['key_id']}")).json()
            assert revoked["revoked_s"] > 0
            assert code(await dora.get("/tasks")) == (401, "unauthorized")
        listed = await olga.get("/keys")
        assert len(listed.json()) == 5
        assert made["key"].split("_", 2)[2] not in listed.text
        assert code(await olga.delete("/keys/00000000")) == (404, "not_found")
        bad = [{}, {"owner": "a b"}, {"owner": "d", "role": "root"}, {"owner": "d", "expires_days": 0},
               {"owner": "d", "secret": "x"}, {"owner": "d", "label": "\u0000"}, {"owner": 3}]  # fmt: skip
        for body in bad:
            assert code(await olga.post("/keys", json=body)) == (422, "invalid"), body
        assert code(await olga.post("/keys", content=b"{}")) == (415, "media_type")
        assert code(await olga.post("/keys", json={"owner": "d" * 70_000})) == (413, "too_large")
        assert (await olga.put("/owners/dora", json={"max_tasks": 3})).json() == {"owner": "dora", "max_tasks": 3}
        assert (await olga.get("/owners")).json() == [{"owner": "dora", "max_tasks": 3}]
        for body in ({"max_tasks": -1}, {"max_tasks": "3"}, {"max_tasks": 1.5}, {}):
            assert code(await olga.put("/owners/dora", json=body)) == (422, "invalid")


async def test_no_body_is_read_for_a_stranger_nor_without_a_bound(keyed):
    """Every path but the five, whose bodies have tests of their own."""
    document = keyed.app._views.openapi()
    calls = [
        (method.upper(), path.replace("{owner}", "ann").replace("{key_id}", "00000000"))
        for path, methods in document["paths"].items()
        for method, call in methods.items()
        if "requestBody" in call and "contract" not in call["tags"]
    ]
    assert ("POST", "/keys") in calls
    pieces = []

    async def endless():
        for _ in range(10_000):
            pieces.append(1)
            yield b" " * 1024

    async with keyed.client() as nobody, keyed.client("olga") as olga:
        for method, path in calls:
            headers = {"content-type": "application/json"}
            pieces.clear()
            assert code(await nobody.request(method, path, content=endless(), headers=headers)) == (401, "unauthorized")
            assert len(pieces) <= 2
            assert code(await olga.request(method, path, content=endless(), headers=headers)) == (413, "too_large")
            assert len(pieces) <= 100


async def test_without_a_key_everyone_here_is_the_operator_until_the_first_key(site):
    async with site.client() as nobody:
        task_id = await start(nobody)
        made = await nobody.post("/keys", json={"owner": "local", "role": "operator"})
        assert made.status_code == 201
        assert code(await nobody.post("/end", json={"task_id": task_id})) == (401, "unauthorized")
        assert (await nobody.get("/healthz")).status_code == 200
        async with site.client(made.json()["key"]) as owner:
            assert (await owner.post("/end", json={"task_id": task_id})).status_code == 200


async def test_strange_web_pages_are_refused(site):
    evil = {"Origin": "http://evil.example"}
    for headers in (
        evil,
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Origin": "http://localhost.evil.example"},
    ):
        async with site.client(**headers) as page:
            assert code(await page.post("/start", json={"environment": "scripted", "key": "k"})) == (403, "forbidden")
            assert code(await page.get("/tasks")) == (403, "forbidden")
            assert "access-control-allow-origin" not in (await page.options("/tasks")).headers
    async with site.client(Origin="http://localhost") as page:
        assert (await page.get("/tasks")).status_code == 200
    for host in ("evil.example", "evil.example:8800", "127.0.0.1.evil.example", "10.0.0.1", "[2001:db8::1]", ""):
        async with site.client(Host=host) as page:
            assert code(await page.get("/tasks")) == (403, "forbidden"), host
    for host in ("localhost:8800", "127.0.0.1", "127.9.9.9:1", "[::1]:8800", "LOCALHOST", "gateway.localhost"):
        async with site.client(Host=host) as page:
            assert (await page.get("/tasks")).status_code == 200, host


async def test_with_keys_any_name_may_be_used_but_origins_must_fit(keyed):
    async with keyed.client("ann", Host="gateway.example") as ann:
        assert (await ann.get("/tasks")).status_code == 200
        assert (await ann.get("/tasks", headers={"Origin": "https://gateway.example"})).status_code == 200
        assert code(await ann.get("/tasks", headers={"Origin": "https://evil.example"})) == (403, "forbidden")


async def test_g28_no_secret_is_in_an_answer_or_in_the_log(keyed, bench, monkeypatch, caplog):
    """Every way to fail, with a good key, a wrong one and a body that nobody may repeat."""
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore"):  # the caller's side
        logging.getLogger(name).setLevel(logging.WARNING)
    good = keyed.texts["ann"]
    wrong = f"tide_{good.split('_')[1]}_{'S' * 43}"
    body = "the-body-is-nobodys-business"
    answers: list[httpx.Response] = []
    paths = ("/start", "/observation", "/pause", "/resume", "/end", "/keys", "/owners/ann", "/nope", f"/{good}")
    wrongs = [b"", b"{", b'{"task_id": "' + body.encode() * 20_000]
    wrongs += [json.dumps(data).encode() for data in ({body: body}, {"key": [body]}, [body])]

    async def drive(client: httpx.AsyncClient) -> None:
        for path in paths:
            for content in wrongs:
                for method in ("POST", "PUT", "GET", "DELETE"):
                    headers = {"content-type": "application/json"}
                    answers.append(await client.request(method, path, content=content, headers=headers))
        answers.append(await client.get("/tasks", params={"limit": body, "after": "\0"}))
        answers.append(await client.get("/tasks", headers={"Tide-Contract": "9"}))

    async with (
        keyed.client("ann") as ann,
        keyed.client(wrong) as stranger,
        keyed.client("ann", Origin="http://x") as page,
    ):
        for client in (ann, stranger, page):
            await drive(client)

        async def boom(*_args: object, **_options: object) -> None:
            raise RuntimeError("an unexpected failure")

        monkeypatch.setattr(bench.service, "end", boom)
        monkeypatch.setattr(bench.service, "tasks", boom)
        answers.append(await ann.post("/end", json={"task_id": "t", "reason": body}))
        answers.append(await ann.get("/tasks"))
    assert {500, 401, 403, 404, 405, 413, 422} <= {answer.status_code for answer in answers}
    everything = caplog.text + "".join(answer.text + str(answer.headers) for answer in answers)
    assert "an unexpected failure" in caplog.text
    for text in (good, wrong):
        assert text.split("_", 2)[2] not in everything
    assert body + body not in everything


async def test_the_published_document_says_which_calls_need_a_key(site):
    async with site.client() as client:
        document = (await client.get("/openapi.json")).json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, calls in document["paths"].items():
        for call in calls.values():
            assert ("401" in call["responses"]) == ("security" in call) == (path not in ("/healthz", "/readyz"))
            for status, answer in call["responses"].items():
                if not status.startswith("2"):
                    assert list(answer["content"]) == ["application/problem+json"]
    assert {"/keys", "/owners/{owner}", "/environments/{name}/servers/{instance}/log"} <= document["paths"].keys()
