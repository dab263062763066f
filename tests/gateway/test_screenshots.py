"""Images of observations: stored once, referred to or inlined, read by their owner alone, kept while a row has them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import time

import httpx
import pytest
from scripted_gateway import ENVIRONMENT, start_gateway
from sqlalchemy import func, select

from tide_gateway.blobs import BlobStore
from tide_gateway.models import StartRow, TaskImageRow, TurnRow
from tide_gateway.repository.retention import RetentionRows
from tide_gateway.service.pictures import taken_out
from tide_gateway.service.retention import DAY_S, Retention
from tide_sdk import codec
from tide_sdk.errors import TideError
from tide_sdk.images import ImageRef, data_url, image, read_data_url, read_reference

SIZE = 200_000
TOKENS = "ann:the-long-secret-of-ann,bob:the-long-secret-of-bob"


def url_in(answer: dict) -> str:
    return answer["messages"][0]["content"][1]["image_url"]["url"]


def picture(turn: int, size: int = SIZE) -> bytes:
    """What the scripted environment shows."""
    return (b"\x89PNG\r\n\x1a\n%d" % turn).ljust(size, b"\0")


def digest(turn: int) -> str:
    return hashlib.sha256(picture(turn)).hexdigest()


async def count(bench, table) -> int:
    return await bench.database.read(lambda c: c.execute(select(func.count()).select_from(table)).scalar_one())


def files(folder) -> set[str]:
    return {path.name for path in (folder / "blobs").glob("??/*")}


async def test_an_image_is_stored_once_and_its_answer_refers_to_it(bench, tmp_path):
    one = await bench.start("one", screenshot_bytes=SIZE)
    two = await bench.start("two", screenshot_bytes=SIZE)
    answer = await bench.act(one["task_id"], 0)
    again = await bench.act(one["task_id"], 0)
    assert url_in(one) == url_in(two) == ImageRef(digest(0), "image/png").url
    assert url_in(answer) == url_in(again) == ImageRef(digest(1), "image/png").url
    assert files(tmp_path) == {digest(0), digest(1)}, "each image once, and no body beside it"
    assert await count(bench, TaskImageRow) == 3
    largest = await bench.database.read(lambda c: c.execute(select(func.max(func.length(TurnRow.answer)))).scalar_one())
    assert largest < 1000
    inlined = json.loads(await bench.service.inlined("local", codec.dumps(answer)))
    assert read_data_url(url_in(inlined)) == picture(1)


async def test_a_text_turn_stores_nothing_of_images(bench, tmp_path):
    task = await bench.start("k")
    await bench.act(task["task_id"], 0)
    assert (await count(bench, TaskImageRow), files(tmp_path)) == (0, set())


async def test_an_image_belongs_to_the_owners_of_the_tasks_that_show_it(bench):
    await bench.start("k", screenshot_bytes=SIZE)
    assert await bench.service.image("local", digest(0)) == picture(0)
    assert await bench.service.image(None, digest(0)) == picture(0)
    for owner, name in (("other", digest(0)), ("local", digest(5))):
        with pytest.raises(TideError) as refused:
            await bench.service.image(owner, name)
        assert refused.value.code == "not_found"
    await bench.start("k", owner="other", screenshot_bytes=SIZE)
    assert await bench.service.image("other", digest(0)) == picture(0)


async def test_an_environment_reads_nothing_by_naming_it(bench):
    await bench.start("k", screenshot_bytes=SIZE)
    named = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": ImageRef(digest(0), "image/png").url}}]}
    ]
    answer = codec.dumps({"messages": named})
    assert await bench.service.inlined("other", answer) == answer
    assert b"base64" in await bench.service.inlined("local", answer)


async def test_after_a_crash_a_repeated_turn_has_the_same_image(benches):
    bench = await benches.open()
    task_id = (await bench.start("k", screenshot_bytes=SIZE))["task_id"]
    answer = await bench.act(task_id, 0)
    await benches.crash(bench)
    bench = await benches.open()
    assert url_in(await bench.act(task_id, 0)) == url_in(answer)
    assert url_in(json.loads(await bench.service.latest("local", task_id))) == url_in(answer)
    assert await bench.service.image("local", digest(1)) == picture(1)


@pytest.mark.postgres
async def test_another_replica_answers_and_reads_the_same_image(replicated):
    one, two = await replicated.open(), await replicated.open()
    task = await one.start("k", screenshot_bytes=SIZE)
    answer = await two.act(task["task_id"], 0)
    assert url_in(await one.act(task["task_id"], 0)) == url_in(answer)
    assert await one.service.image("local", digest(1)) == await two.service.image("local", digest(1)) == picture(1)


async def test_an_image_goes_with_the_last_task_that_shows_it(bench, tmp_path):
    rows, blobs = RetentionRows(bench.database), BlobStore(tmp_path / "blobs")
    keep_s = 7 * DAY_S
    retention = Retention(
        rows, bench.repository.instances, blobs, tmp_path / "logs", bench.time, keep_s, forget=bench.service.forget
    )
    for key, turns in (("old", 1), ("young", 0)):
        task_id = (await bench.start(key, screenshot_bytes=SIZE))["task_id"]
        for turn in range(turns):
            await bench.act(task_id, turn)
        if key == "old":
            await bench.end(task_id)
            bench.time.advance(keep_s + 1)
    for path in (tmp_path / "blobs").glob("??/*"):
        os.utime(path, (time.time() - 365 * DAY_S,) * 2)
    assert await retention.tasks() == 1
    assert (await retention.files()).bodies == 1
    assert files(tmp_path) == {digest(0)}, "the living task shows it"
    await bench.end(task_id)
    bench.time.advance(keep_s + 1)
    assert await retention.tasks() == 1
    assert (await retention.files()).bodies == 1
    assert (files(tmp_path), await count(bench, TaskImageRow), await count(bench, StartRow)) == (set(), 0, 0)


async def test_a_file_that_is_lost_is_an_internal_failure_and_no_missing_task(bench, tmp_path):
    answer = await bench.start("k", screenshot_bytes=SIZE)
    (tmp_path / "blobs" / digest(0)[:2] / digest(0)).unlink()
    for call in (bench.service.image("local", digest(0)), bench.service.inlined("local", codec.dumps(answer))):
        with pytest.raises(TideError, match="missing") as failed:
            await call
        assert failed.value.status == 500


def test_what_is_no_plain_image_stays_where_it_is():
    whole = data_url(picture(0, 31), "image/png")
    strange = (
        "https://example.org/a.png",
        "data:image/svg+xml;base64,PHN2Zy8+",
        whole.replace("image/png", "image/jpeg"),  # the bytes say otherwise
        whole.replace(";base64", ";charset=utf-8;base64"),
        whole[:-4] + "\n" + whole[-4:],
        whole.rstrip("="),
        "data:image/png;base64,",
        "data:image/png;base64,iVBORw0KGgp=",  # bits that stand for nothing
        ImageRef("0" * 64, "image/png").url,
    )
    for url in strange:
        body = codec.dumps(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
        )
        assert taken_out(body) == (body, ()), url
    # Only where a message shows an image: neither in words, nor beside the messages.
    body = codec.dumps({"messages": [{"role": "user", "content": whole}], "info": {"image": image(picture(0, 31))}})
    assert taken_out(body) == (body, ())


def test_detail_and_neighbours_of_an_image_stay():
    part = image(picture(0, 31), detail="low")
    message = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen"}, part]}
    body, (stored,) = taken_out(codec.dumps({"messages": [message, {"role": "user", "content": "x"}], "turn": 1}))
    shown = codec.loads(body)
    assert shown["messages"][1] == {"role": "user", "content": "x"}
    changed = shown["messages"][0]["content"][1]["image_url"]
    assert (changed["detail"], read_reference(changed["url"])) == ("low", ImageRef(stored.digest, "image/png"))
    assert stored.data == picture(0, 31)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A gateway process with two owners."""
    folder = tmp_path_factory.mktemp("pictures")
    replica = start_gateway(folder, f"sqlite:///{folder / 'gateway.db'}", TOKENS)
    yield replica.url
    assert replica.stop(signal.SIGTERM) == 0, replica.text()


def caller(url: str, name: str = "ann", **headers: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer the-long-secret-of-{name}"} | headers)


def start(client: httpx.Client, key: str) -> dict:
    task = {"screenshot_bytes": SIZE}
    answer = client.post("/start", json={"environment": ENVIRONMENT, "key": key, "task": task})
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_a_caller_gets_images_inline_unless_it_asks_for_references(served):
    with caller(served) as plain, caller(served, **{"Tide-Images": "reference"}) as lean:
        started = start(plain, "forms")
        assert read_data_url(url_in(started)) == picture(0)
        assert read_reference(url_in(start(lean, "forms"))) == ImageRef(digest(0), "image/png")
        body = {"task_id": started["task_id"], "turn": 0, "message": {"role": "assistant", "content": "go"}}
        referred = lean.post("/observation", json=body)
        assert read_reference(url_in(referred.json())) == ImageRef(digest(1), "image/png")
        assert len(referred.content) < 2000
        assert read_data_url(url_in(plain.post("/observation", json=body).json())) == picture(1)
        latest = f"/observation?task_id={started['task_id']}"
        assert read_data_url(url_in(plain.get(latest).json())) == picture(1)
        assert read_reference(url_in(lean.get(latest).json())) is not None
        assert base64.b64encode(picture(1)) in plain.get(latest, headers={"Tide-Images": "anything"}).content


def test_a_blob_is_its_owners_bytes_and_nothing_that_a_browser_runs(served):
    with caller(served) as ann, caller(served, "bob") as bob, httpx.Client(base_url=served) as nobody:
        start(ann, "blobs")
        answer = ann.get(f"/blobs/{digest(0)}")
        assert (answer.status_code, answer.content) == (200, picture(0))
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in answer.headers["content-security-policy"]
        etag = answer.headers["etag"]
        known = ann.get(f"/blobs/{digest(0)}", headers={"If-None-Match": etag})
        assert (known.status_code, known.content, known.headers["etag"]) == (304, b"", etag)
        for tags, status in (
            (f'"other", W/{etag}', 304),
            (f'"other",{etag}', 304),
            ('W/"other"', 200),
            (etag[:-2], 200),
        ):
            assert ann.get(f"/blobs/{digest(0)}", headers={"If-None-Match": tags}).status_code == status, tags
        for client, name, status in ((bob, digest(0), 404), (ann, "0" * 64, 404), (nobody, digest(0), 401)):
            refused = client.get(f"/blobs/{name}", headers={"If-None-Match": etag})
            assert (refused.status_code, refused.headers["content-type"]) == (status, "application/problem+json")
        for name in ("x", digest(0).upper(), "..%2f" + "0" * 61):
            assert ann.get(f"/blobs/{name}").status_code in (404, 422)
