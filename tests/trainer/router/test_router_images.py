"""Images at the router: given once, referred to or inline, counted in the prompt and in the segments."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file
from vision_chat import PLACEHOLDER, bomb, make_vision_chat, said, screenshot, seen

from tide_sdk.image_window import ImageWindow
from tide_sdk.images import ImageRef, data_url, digest_of, image
from tide_trainer import types
from tide_trainer.backends.fake_core import FakeCore, FakeSettings
from tide_trainer.errors import ImageFailed
from tide_trainer.images import ImageStore, check_spans
from tide_trainer.router.openai_wire import ApiError
from tide_trainer.router.planning import check_images
from tide_trainer.router.renderer import Renderer
from tide_trainer.segments import read_segment, segment_data


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> Renderer:
    return Renderer(make_vision_chat(tmp_path_factory.mktemp("vision") / "model"))


@pytest.fixture
def shown(router, vision, tmp_path):
    """A router of a model that takes images, whose engine answers `click`, with an open session."""
    made = type(router)(vision, images=ImageStore(tmp_path / "images"))
    made.store = made.images
    made.seer = made.engine(lambda _: [*vision.encode_after("click"), *vision.stop_token_ids])
    made.open(max_context_tokens=20_000)
    return made


async def put(router, data: bytes, digest: str | None = None, **headers: str):
    path = f"/sessions/s/v1/images/{digest or digest_of(data)}"
    status, body = await router.call("PUT", path, data, **{"content_type": "image/png", **headers})
    return status, json.loads(body)


def segments_of(router) -> list[types.Segment]:
    return [read_segment(data) for data in router.control.close({"session": "s"})["segments"]]


def check(router, ids, spans) -> None:
    check_spans(ids, spans, router.renderer.images.placeholder_id)


async def test_an_image_that_was_given_stands_in_the_prompt_with_all_its_tokens(shown):
    data = screenshot(1)
    num_tokens = shown.renderer.images.count(100, 80)
    assert await put(shown, data) == (200, {"digest": digest_of(data), "num_tokens": num_tokens})
    status, _ = await shown.chat([seen(data)])
    assert status == 200
    assert shown.store.read(digest_of(data)) == data
    (prompt,), (spans,) = shown.seer.sent, shown.seer.images
    check(shown, prompt, spans)
    assert [(span.num_tokens, span.digest) for span in spans] == [(num_tokens, digest_of(data))]
    assert shown.renderer.token_text(prompt[spans[0].start - 1]) == "<|vision_start|>"
    turn = next(payload for name, payload in shown.events if name == "turn")
    assert turn["footprint"]["image_tokens"] == num_tokens
    assert turn["footprint"]["prompt_tokens"] == len(prompt)
    (segment,) = segments_of(shown)
    assert segment.images == spans


async def test_an_image_in_a_message_is_the_same_as_one_that_was_given(shown):
    data = screenshot(2)
    inline = {"role": "user", "content": [{"type": "text", "text": "look"}, image(data)]}
    assert (await shown.chat([inline]))[0] == 200
    assert shown.store.read(digest_of(data)) == data
    assert (await shown.chat([seen(data), said(), {"role": "user", "content": "go"}]))[0] == 200
    (segment,) = segments_of(shown)
    assert [span.digest for span in segment.images] == [digest_of(data)]
    assert shown.seer.images[0] == shown.seer.images[1]


async def test_two_images_of_two_sizes_keep_their_order_and_counts(shown):
    small, large = screenshot(3, 60, 60), screenshot(4, 300, 120)
    for data in (small, large):
        await put(shown, data)
    both = {"role": "user", "content": [*seen(large)["content"], *seen(small)["content"]]}
    assert (await shown.chat([both]))[0] == 200
    count = shown.renderer.images.count
    assert [span.num_tokens for span in shown.seer.images[0]] == [count(300, 120), count(60, 60)]
    check(shown, shown.seer.sent[0], shown.seer.images[0])


async def test_s3_ten_images_pruned_to_five_split_into_segments_whose_images_fit(shown):
    """Source: TideRL appendix C.2: at the tenth image the five newest stay, so a request has five to nine."""
    pictures = [screenshot(seed, 60 + seed, 80) for seed in range(1, 20)]
    messages: list[dict] = []
    window = ImageWindow(max_images=10, keep=5)
    for data in pictures:
        await put(shown, data)
        messages.append(seen(data))
        assert (await shown.chat(window.prune(messages)))[0] == 200
        messages.append(said())
    sizes = [len(spans) for spans in shown.seer.images]
    assert sizes == [1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7, 8, 9]
    for prompt, spans in zip(shown.seer.sent, shown.seer.images, strict=True):
        check(shown, prompt, spans)
    segments = segments_of(shown)
    digests = [digest_of(data) for data in pictures]
    assert [[span.digest for span in segment.images] for segment in segments] == [
        digests[0:9], digests[5:14], digests[10:19],
    ]  # fmt: skip
    for segment, length in zip(segments, (9, 5, 5), strict=True):
        check(shown, segment.token_ids, segment.images)
        # Each turn is trained once, in the segment that it was sampled in.
        assert (
            sum(
                token_id in shown.renderer.stop_token_ids
                for token_id, own in zip(segment.token_ids, segment.sampled, strict=True)
                if own
            )
            == length
        )
        for span in segment.images:
            assert not any(segment.sampled[span.start : span.start + span.num_tokens])


async def test_an_engine_that_counts_by_itself_counts_the_same(shown, vision, tmp_path):
    """The fake engine looks at pixels and placeholders as a real one does, and refuses what differs."""
    size = max(vision._tokenizer.get_vocab().values()) + 1
    folder = make_vision_chat(tmp_path / "fake")
    save_file({"logits": np.zeros((size, size), np.float32)}, folder / "model.safetensors")
    settings = FakeSettings(str(folder / "model.safetensors"), kv_tokens=4096, image_folder=str(shown.store.folder))
    core = FakeCore(settings)

    async def generate(prompt_ids, sampling, *, request_id=None, priority=0, timeout_s=None, images=()):
        return await core.generate(request_id, prompt_ids, sampling, priority, images)

    shown.seer.generate = generate
    messages: list[dict] = []
    for seed, width, height in ((1, 1280, 720), (2, 33, 500), (3, 56, 56)):
        await put(shown, screenshot(seed, width, height))
        messages.append(seen(screenshot(seed, width, height)))
        status, body = await shown.chat(messages)
        assert status == 200, body
        messages.append(body["choices"][0]["message"])
    (shown.store.folder / digest_of(screenshot(3, 56, 56))).unlink()
    fresh = FakeCore(settings)
    core = fresh
    status, body = await shown.chat([*messages, {"role": "user", "content": "go"}])
    assert (status, body["error"]["code"]) == (503, "engine_refused")
    assert "is not in" in body["error"]["message"]


async def test_the_same_words_around_another_image_are_another_history(shown):
    one, two = screenshot(5), screenshot(6)
    for data in (one, two):
        await put(shown, data)
    more = {"role": "user", "content": "go"}
    await shown.chat([seen(one)])
    await shown.chat([seen(one), said(), more])
    await shown.chat([seen(two), said(), more])
    segments = segments_of(shown)
    assert [[span.digest for span in segment.images] for segment in segments] == [[digest_of(one)], [digest_of(two)]]


async def test_a_context_that_overflows_is_refused_and_never_cut_inside_an_image(shown):
    """S3: truncation inside an image; here nothing is ever truncated."""
    data = screenshot(7, 600, 600)
    shown.open("t", max_context_tokens=40)
    path = f"/sessions/t/v1/images/{digest_of(data)}"
    assert (await shown.call("PUT", path, data, key="key-of-t", content_type="image/png"))[0] == 200
    status, body = await shown.chat([seen(data)], session="t")
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert shown.seer.sent == []


async def test_an_image_of_another_session_must_be_given_again(shown):
    data = screenshot(8)
    shown.open("other")
    path = f"/sessions/other/v1/images/{digest_of(data)}"
    assert (await shown.call("PUT", path, data, key="key-of-other", content_type="image/png"))[0] == 200
    status, body = await shown.chat([seen(data)])
    assert (status, body["error"]["code"]) == (400, "image_unknown")
    assert (await put(shown, data))[0] == 200
    assert (await shown.chat([seen(data)]))[0] == 200


async def test_what_is_no_whole_image_is_refused_and_not_kept(shown):
    data = screenshot(9)
    for given, digest, code in (
        (data, "0" * 64, "invalid_image"),
        (data, "X" * 64, "invalid_image"),
        (data[:-40], None, "invalid_image"),
        (b"<html></html>", None, "invalid_image"),
        (bomb(), None, "invalid_image"),
        (screenshot(9, 2000, 4), None, "invalid_image"),  # no processor takes such a strip
        (b"", None, "invalid_image"),
    ):
        status, body = await put(shown, given, digest)
        assert (status, body["error"]["code"]) == (400, code), (digest, body)
    assert not shown.store.folder.exists() or not any(shown.store.folder.iterdir())
    for headers, status in (({"content_type": "text/html"}, 415), ({"key": "nobody's key"}, 401)):
        assert (await put(shown, data, **headers))[0] == status
    assert (await shown.call("GET", f"/sessions/s/v1/images/{digest_of(data)}"))[0] == 405
    shown.limits = replace(shown.limits, max_body_bytes=100)
    shown.app._limits = shown.limits
    assert (await put(shown, data))[0] == 413


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://127.0.0.1:1/secret.png", "invalid_value"),
        ("https://example.org/a.png", "invalid_value"),
        ("file:///etc/passwd", "invalid_value"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "invalid_image"),
        ("data:image/png;base64,AAAA", "invalid_image"),
        (data_url(screenshot(1)[:-40], "image/png"), "invalid_image"),
        (ImageRef("0" * 64, "image/png").url, "image_unknown"),
        ("tide-blob:sha256:x", "invalid_image"),
    ],
)
async def test_a_url_that_is_no_image_here_is_refused_with_words(shown, url, code):
    content = [{"type": "image_url", "image_url": {"url": url}}]
    status, body = await shown.chat([{"role": "user", "content": content}])
    assert (status, body["error"]["code"]) == (400, code), body
    assert shown.seer.sent == []


async def test_words_that_look_like_an_image_are_refused(shown):
    data = screenshot(1)
    await put(shown, data)
    for messages in ([{"role": "user", "content": PLACEHOLDER}], [seen(data, f"x {PLACEHOLDER} y")]):
        status, body = await shown.chat(messages)
        assert (status, body["error"]["code"]) == (400, "template_refused")
        assert PLACEHOLDER in body["error"]["message"]
    placeholder = shown.renderer.images.placeholder_id
    for prompt in (f"go {PLACEHOLDER}", [1, placeholder, 2]):
        body = json.dumps({"model": "policy", "prompt": prompt}).encode()
        assert (await shown.call("POST", "/sessions/s/v1/completions", body))[0] == 400, prompt


async def test_a_model_without_images_says_so(router):
    router.engine(lambda _: [1])
    router.open()
    status, body = await router.chat([seen(screenshot(1))])
    assert (status, body["error"]["code"]) == (400, "images_unsupported")
    assert "takes no images" in body["error"]["message"]
    assert (await put(router, screenshot(1)))[1]["error"]["code"] == "images_unsupported"


async def test_a_sampled_placeholder_is_asked_for_again(shown):
    placeholder = shown.renderer.images.placeholder_id
    answers = [
        [placeholder, *shown.renderer.stop_token_ids],
        [*shown.renderer.encode_after("click"), *shown.renderer.stop_token_ids],
    ]
    shown.seer.say = lambda _: answers.pop(0)
    assert (await shown.chat([{"role": "user", "content": "go"}]))[0] == 200
    assert "call_failed" in shown.names()
    (segment,) = segments_of(shown)
    assert placeholder not in segment.token_ids


async def test_each_hand_over_looks_at_the_counts_again(shown):
    data = screenshot(1)
    await put(shown, data)
    await shown.chat([seen(data)])
    session = shown.control.sessions["s"]
    turn = session.capture.plan([seen(data), said(), {"role": "user", "content": "go"}])
    (span,) = turn.images
    for wrong in ((), (replace(span, start=span.start + 1),), (replace(span, num_tokens=span.num_tokens - 1),)):
        with pytest.raises(ApiError) as refused:
            check_images(replace(turn, images=wrong), shown.renderer)
        assert (refused.value.status, refused.value.code) == (500, "images_differ")
    (segment,) = session.capture.segments()
    assert read_segment(segment_data(segment)) == segment
    good = segment_data(segment)
    for name, wrong in (
        ("images", [(span.start, span.num_tokens - 1, span.digest)]),
        ("images", [(span.start - 1, span.num_tokens, span.digest)]),
        ("images", [(len(segment.token_ids), span.num_tokens, span.digest)]),
        ("images", [(span.start, span.num_tokens, "a name")]),
        ("sampled", (True,) * len(segment.token_ids)),
    ):
        with pytest.raises(ValueError, match=r"image|placeholder|digest"):
            read_segment(good | {name: wrong})


async def test_a_store_that_cannot_keep_it_is_the_servers_fault(shown, monkeypatch):
    def full(_: bytes) -> str:
        raise ImageFailed("the disk is full")

    monkeypatch.setattr(shown.store, "put", full)
    status, body = await put(shown, screenshot(1))
    assert (status, body["error"]["code"]) == (503, "image_store_failed")
