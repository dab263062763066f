"""The image store, how many tokens an image takes, and the check of spans at every hand-over."""

from __future__ import annotations

import errno
import io
import json
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tide_trainer.errors import ConfigurationError, ImageFailed, ImageRefused
from tide_trainer.images import ImageStore, ImageTokens, check_spans, decode, image_size
from tide_trainer.types import ImageSpan

DIGEST = "a" * 64
PAD = 9


def png(width: int, height: int, colour: tuple[int, int, int] = (200, 10, 10)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def model_folder(folder, *, model_type="qwen2_5_vl", processor=None, vision=None):
    config = {"model_type": model_type, "image_token_id": 7, "video_token_id": 8}
    config["vision_config"] = vision or {"patch_size": 14, "spatial_merge_size": 2}
    settings = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 50176} | (processor or {})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    added = [{"id": 7, "content": "<|image_pad|>"}, {"id": 8, "content": "<|video_pad|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return folder


def test_an_image_is_kept_once_under_its_digest(tmp_path):
    store = ImageStore(tmp_path / "images")
    digest = store.put(b"one")
    assert store.put(b"one") == digest
    assert store.read(digest) == b"one"
    assert [path.name for path in store.folder.iterdir()] == [digest]


def test_a_changed_file_is_never_taken_for_the_image(tmp_path):
    store = ImageStore(tmp_path)
    digest = store.put(b"one")
    store.path(digest).write_bytes(b"two")
    with pytest.raises(ImageFailed, match="does not hold the bytes"):
        store.read(digest)


def test_a_torn_file_is_replaced(tmp_path):
    store = ImageStore(tmp_path)
    digest = store.put(b"one image")
    store.path(digest).write_bytes(b"one")
    assert store.put(b"one image") == digest
    assert store.read(digest) == b"one image"


@pytest.mark.parametrize("digest", ["../../etc/passwd", "", "A" * 64, "a" * 63, f"{'a' * 64}\n", None, 7])
def test_what_is_no_digest_never_becomes_a_path(tmp_path, digest):
    with pytest.raises(ImageRefused, match="no SHA-256"):
        ImageStore(tmp_path).path(digest)


def test_a_missing_image_is_named(tmp_path):
    with pytest.raises(ImageFailed, match=DIGEST):
        ImageStore(tmp_path).read(DIGEST)


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ImageFailed, match="No space left"):
        ImageStore(tmp_path).put(b"one")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"12345"])
def test_sizes_of_files_have_a_limit(tmp_path, data):
    with pytest.raises(ImageRefused, match="1 to 4 bytes"):
        ImageStore(tmp_path, max_bytes=4).put(data)


@pytest.mark.parametrize("data", [b"no image", png(40, 40)[:-40]], ids=["text", "cut off"])
def test_what_cannot_be_decoded_is_refused(data):
    with pytest.raises(ImageRefused, match="cannot be decoded"):
        image_size(data)


def test_a_small_file_of_a_huge_image_is_refused_before_it_is_decoded():
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "BMP")
    bomb = bytearray(file.getvalue())
    bomb[18:26] = (9_000).to_bytes(4, "little") * 2
    with pytest.raises(ImageRefused, match="9000 x 9000"):
        image_size(bytes(bomb))


def test_an_image_is_decoded_to_rgb():
    file = io.BytesIO()
    Image.new("RGBA", (3, 2), (1, 2, 3, 0)).save(file, "PNG")
    assert (decode(file.getvalue()).mode, image_size(file.getvalue())) == ("RGB", (3, 2))


def test_the_count_is_that_of_the_family_s_own_processor(tmp_path):
    source = random.Random(5)
    for settings in ({}, {"min_pixels": 784, "max_pixels": 784 * 6}, {"patch_size": 16, "max_pixels": 4 * 10**6}):
        vision = {"patch_size": settings.get("patch_size", 14), "spatial_merge_size": 2}
        tokens = ImageTokens.read(model_folder(tmp_path, processor=settings, vision=vision))
        assert tokens is not None
        processor = Qwen2VLImageProcessorPil.from_dict(json.loads((tmp_path / "preprocessor_config.json").read_text()))
        for _ in range(400):
            width = round(2 ** source.uniform(0, 12))
            height = min(max(round(width * 2 ** source.uniform(-7.6, 7.6)), 1), 8192)
            if max(width, height) > 200 * min(width, height):
                continue
            patches = processor.get_number_of_image_patches(height, width)
            assert tokens.count(width, height) == patches // 4, (settings, width, height)
            assert tokens.count(width, height) <= tokens.max_tokens


def test_the_count_is_that_of_the_pixels(tmp_path):
    tokens = ImageTokens.read(model_folder(tmp_path))
    assert tokens is not None
    processor = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    for width, height in ((1, 1), (640, 360), (31, 900), (224, 224)):
        made = processor(images=[decode(png(width, height))], return_tensors="np")
        assert made["pixel_values"].shape[0] == 4 * tokens.count(width, height)


def test_a_long_strip_is_refused_as_the_processor_would(tmp_path):
    tokens = ImageTokens.read(model_folder(tmp_path))
    assert tokens is not None
    with pytest.raises(ImageRefused, match="200 times"):
        tokens.count(1, 201)


def test_a_model_folder_says_what_it_is(tmp_path):
    tokens = ImageTokens.read(model_folder(tmp_path))
    assert tokens is not None
    assert (tokens.placeholder_id, tokens.placeholder_text) == (7, "<|image_pad|>")
    assert tokens.forbidden_ids == (7, 8)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert ImageTokens.read(tmp_path) is None


def test_the_nested_settings_that_newer_folders_have_come_first(tmp_path):
    model_folder(tmp_path)
    size = {"shortest_edge": 784, "longest_edge": 1568}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"size": size}}))
    tokens = ImageTokens.read(tmp_path)
    assert tokens is not None
    assert (tokens.min_pixels, tokens.max_pixels) == (784, 1568)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "llava"}, "qwen2_vl, qwen2_5_vl"),
        ({"vision": {"patch_size": 16, "spatial_merge_size": 2}}, "patch_size"),
        ({"processor": {"do_resize": False}}, "do_resize"),
        ({"processor": {"max_pixels": "many"}}, "wrong"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(tmp_path, change, told):
    with pytest.raises(ConfigurationError, match=told) as caught:
        ImageTokens.read(model_folder(tmp_path, **change))
    assert caught.value.field == "model.path"


def test_a_folder_without_its_files_says_which(tmp_path):
    (model_folder(tmp_path) / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigurationError, match="preprocessor_config"):
        ImageTokens.read(tmp_path)


def span(start: int, num_tokens: int, digest: str = DIGEST) -> ImageSpan:
    return ImageSpan(start, num_tokens, digest)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6), st.integers(0, 3))
def test_spans_that_cover_exactly_the_placeholders_pass(parts, end):
    ids, spans = [], []
    for gap, num_tokens in parts:
        ids += [1] * gap
        spans.append(span(len(ids), num_tokens))
        ids += [PAD] * num_tokens
    ids += [2] * end
    check_spans(tuple(ids), spans, PAD)
    # One id more or less of any image is seen.
    for index, one in enumerate(spans):
        for num_tokens in (one.num_tokens - 1, one.num_tokens + 1):
            with pytest.raises(ValueError, match=r"at \d+"):
                check_spans(ids, [*spans[:index], span(one.start, num_tokens), *spans[index + 1 :]], PAD)
        with pytest.raises(ValueError, match="no image"):
            check_spans(ids, [*spans[:index], *spans[index + 1 :]], PAD)


@pytest.mark.parametrize(
    ("ids", "spans", "placeholder", "told"),
    [
        ((1, PAD, PAD), [], PAD, "placeholder id at 1"),
        ((1, PAD, 1, PAD), [span(1, 1)], PAD, "placeholder id at 3"),
        ((1, PAD, PAD), [span(1, 2), span(2, 1)], PAD, "begins before 3"),
        ((PAD, 1, PAD), [span(2, 1), span(0, 1)], PAD, "placeholder id at 0"),
        ((1, PAD), [span(1, 2)], PAD, "1 placeholder ids stand there, of 2"),
        ((1, PAD), [span(-1, 1)], PAD, "begins before 0"),
        ((1, PAD), [span(1, 1, "../x")], PAD, "digest"),
        ((1, PAD), [span(1, 1)], None, "takes no images"),
    ],
)
def test_wrong_spans_name_the_place(ids, spans, placeholder, told):
    with pytest.raises(ValueError, match=told):
        check_spans(ids, spans, placeholder)


def test_ids_without_images_pass_in_any_model():
    check_spans((1, 2, 3), (), PAD)
    check_spans((1, 2, PAD), (), None)


def test_sixteen_bits_of_grey_keep_their_shades():
    side, file = 256, io.BytesIO()
    ramp = Image.new("I;16", (side, 1))
    for column in range(side):
        ramp.putpixel((column, 0), column * 257)
    ramp.save(file, "PNG")
    with decode(file.getvalue()) as image:
        shades = [image.getpixel((column, 0)) for column in range(side)]
    assert all(abs(shade[0] - column) <= 1 for column, shade in enumerate(shades)), (
        "Pillow's own makes 255 of nearly all"
    )
