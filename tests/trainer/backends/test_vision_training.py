"""Images in the training backend: the family's own numbers, bounded reading, ranks without images, clear errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from pictures import picture, prompt_with, vision_model
from safetensors.torch import load_file

from tide_trainer.backends.fsdp import FsdpBackend
from tide_trainer.backends.fsdp_worker import FsdpWorker
from tide_trainer.backends.image_inputs import ImageInputs, mrope_positions
from tide_trainer.backends.losses import Totals
from tide_trainer.backends.training_wire import FsdpSettings, RankSettings, check_sequence, pack
from tide_trainer.cluster.local import LocalProcesses
from tide_trainer.errors import ImageFailed, ImageRefused
from tide_trainer.images import ImageStore, ImageTokens, decode
from tide_trainer.types import ImageSpan, Sequence, TrainBatch

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(vision_model(tmp_path_factory.mktemp("vision")))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return ImageStore(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def tokens(model):
    return ImageTokens.read(model)


@pytest.fixture(scope="module")
def worker(model, store):
    made = FsdpWorker(RankSettings(FsdpSettings(model, "", device="cpu", image_folder=str(store.folder)), 0, "", ""))
    made.boot(None)
    return made


def sequence(store, tokens, images, answer=(12, 13, 2), seed=0):
    ids, spans = prompt_with(store, tokens, images, seed=seed)
    sampled = [False] * len(ids) + [True] * len(answer)
    logprobs = [0.0] * len(ids) + [-2.0] * len(answer)
    return Sequence((*ids, *answer), tuple(sampled), tuple(logprobs), 1.0, spans)


def scored(worker, sequences):
    packed = [pack(one) for one in sequences]
    return worker.score([packed], any(one.images for one in sequences))


def reference(model, store, one):
    """The log-probs of the sampled ids by transformers' own way from images to logits."""
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    inner = AutoModelForImageTextToText.from_pretrained(model, local_files_only=True)
    ids = torch.tensor([one.token_ids])
    images = [decode(store.read(span.digest)) for span in one.images]
    made = AutoImageProcessor.from_pretrained(model, backend="pil")(images=images, return_tensors="pt")
    kinds = (ids == inner.config.image_token_id).long()
    with torch.no_grad():
        logits = inner(input_ids=ids, mm_token_type_ids=kinds, **made).logits[0].log_softmax(-1)
    return [float(logits[place - 1, ids[0, place]]) for place, sampled in enumerate(one.sampled) if sampled]


def test_scores_equal_transformers_for_images_of_several_sizes_in_one_padded_micro_batch(worker, model, store, tokens):
    sizes = [picture(1), picture(2, 60, 200), picture(3, 400, 300)]
    sequences = [sequence(store, tokens, sizes), sequence(store, tokens, sizes[1:2], seed=1)]
    text = sequence(store, tokens, [], seed=2)
    found = scored(worker, [*sequences, text])
    for one, logprobs in zip(sequences, found, strict=False):
        assert logprobs == pytest.approx(reference(model, store, one), abs=2e-5)
    assert found[2] == pytest.approx(scored(worker, [text])[0], abs=2e-5)


def test_another_image_in_the_same_place_changes_the_scores(worker, store, tokens):
    first, second = (scored(worker, [sequence(store, tokens, [picture(seed)])])[0] for seed in (1, 2))
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 1e-3


def test_positions_are_those_of_the_family(model):
    from transformers import AutoModelForImageTextToText

    inner = AutoModelForImageTextToText.from_pretrained(model, local_files_only=True).model
    spans = [ImageSpan(2, 6, "a" * 64), ImageSpan(9, 4, "b" * 64)]
    grids = [(1, 4, 6), (1, 4, 4)]
    ids = torch.full((1, 15), 12)
    for span in spans:
        ids[0, span.start : span.start + span.num_tokens] = inner.config.image_token_id
    kinds = (ids == inner.config.image_token_id).long()
    expected, _ = inner.get_rope_index(ids, kinds, torch.tensor(grids))
    assert torch.equal(mrope_positions(15, spans, grids, 2), expected[:, 0])


def test_a_micro_batch_without_images_trains_the_same_where_another_rank_has_some(worker, store, tokens):
    text = [pack(sequence(store, tokens, [], seed=seed)) for seed in range(2)]
    alone = worker.score([text], False)
    beside = worker.score([text], True)
    assert alone[0] == pytest.approx(beside[0], abs=1e-6)
    # An empty share takes part too.
    assert worker.score([[]], True) == []


def test_the_vision_tower_trains(model, store, tokens):
    settings = FsdpSettings(model, "", device="cpu", image_folder=str(store.folder))
    made = FsdpWorker(RankSettings(settings, 0, "", ""))
    made.boot(None)
    before = {name: value.clone() for name, value in made._model.tensors()}
    packed = pack(sequence(store, tokens, [picture(4)]))
    made.train("policy", [[packed]], Totals(3, 1), 0.01, True)
    moved = {name for name, value in made._model.tensors() if not torch.equal(before[name], value)}
    assert any("visual.patch_embed" in name for name in moved)
    assert any("language_model.layers.0" in name for name in moved)


def test_an_image_that_makes_another_number_of_tokens_is_named(model, store, tokens):
    ids, spans = prompt_with(store, tokens, [picture(5)])
    wrong = [dataclasses.replace(spans[0], digest=store.put(picture(6, 30, 30)))]
    with pytest.raises(ValueError, match=r"at 5 has 12 placeholder ids, and .* makes 4 of it"):
        ImageInputs(model, store).load(ids, wrong)


def test_what_is_in_the_store_and_no_image_is_refused(model, store, tokens):
    ids, spans = prompt_with(store, tokens, [picture(5)])
    with pytest.raises(ImageRefused):
        ImageInputs(model, store).load(ids, [dataclasses.replace(spans[0], digest=store.put(b"no image"))])


def test_patches_that_are_kept_have_a_limit(model, store, tokens):
    prompts = [prompt_with(store, tokens, [picture(seed)]) for seed in (10, 11, 10, 10)]
    reads: list[str] = []
    read, one = store.read, 48 * 1176 * 4

    class Counting(ImageStore):
        def read(self, digest):
            reads.append(digest)
            return read(digest)

    # Without a cache an image is cut when it is first seen and again for its patches.
    for limit, expected in ((0, 6), (one, 3), (2 * one, 2)):
        reads.clear()
        inputs = ImageInputs(model, Counting(store.folder), max_cached_bytes=limit)
        for ids, spans in prompts:
            (found,) = inputs.load(ids, spans)
            assert found.pixels.shape == (48, 1176)
        assert (len(reads), inputs._cached_bytes) == (expected, min(limit, 2 * one))


def test_an_image_that_comes_again_is_not_read_until_its_patches_are_wanted(model, store, tokens):
    ids, spans = prompt_with(store, tokens, [picture(seed) for seed in range(20, 26)])
    inputs = ImageInputs(model, store)
    first = inputs.load(ids, spans)
    file = store.path(spans[0].digest)
    file.rename(file.with_suffix(".away"))
    with pytest.raises(ImageFailed, match="no longer"):
        inputs.load(ids, spans)
    with pytest.raises(ImageFailed, match="is not in"):
        _ = first[0].pixels
    file.with_suffix(".away").rename(file)
    assert [found.num_tokens for found in inputs.load(ids, spans)] == [12] * 6
    assert torch.equal(first[0].pixels, inputs.load(ids, spans)[0].pixels)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"images": ()}, r"sequences\[3\]\.images: a placeholder id at 5"),
        ({"token_ids": (4, 7, 9, 9)}, "images"),
        ({"sampled": (True,) * 23}, r"sampled is True inside the image at 5"),
    ],
)
def test_a_sequence_whose_images_do_not_fit_is_named_before_it_travels(store, tokens, change, told):
    good = sequence(store, tokens, [picture(1)], answer=(2,))
    check_sequence(good, 3, tokens.placeholder_id)
    size = len(change.get("token_ids", good.token_ids))
    change = {"sampled": good.sampled[:size], "logprobs": good.logprobs[:size], **change}
    change["sampled"] = change["sampled"][:size]
    with pytest.raises(ValueError, match=told):
        check_sequence(dataclasses.replace(good, **change), 3, tokens.placeholder_id)


async def test_two_ranks_of_which_one_has_no_image_agree_with_one_and_go_on_from_a_checkpoint(
    model, store, tokens, tmp_path
):
    sequences = (
        sequence(store, tokens, [picture(1), picture(2, 60, 200)]),
        sequence(store, tokens, [], seed=4),
        sequence(store, tokens, [], seed=5),
    )
    # Less than one sequence: the rank that gets the second micro-batch never sees an image.
    common = {"device": "cpu", "micro_batch_tokens": 8, "image_folder": str(store.folder), "timeout_s": 60}
    alone = FsdpWorker(RankSettings(FsdpSettings(model, "", **common), 0, "", ""))
    alone.boot(None)
    alone.train("policy", [[pack(one)] for one in sequences], Totals(9, 3), None, True)
    processes = LocalProcesses(tmp_path / "logs")
    try:
        backend = FsdpBackend(FsdpSettings(model, str(tmp_path / "p"), num_ranks=2, **common), processes)
        await backend.start()
        missing = dataclasses.replace(sequences[0].images[0], digest="f" * 64)
        torn = dataclasses.replace(sequences[0], images=(missing, *sequences[0].images[1:]))
        with pytest.raises(ImageFailed, match="is not in the image store"):
            await backend.train(TrainBatch("policy", (torn,)))
        await backend.train(TrainBatch("policy", sequences))
        published = load_file((await backend.publish(1)).path)
        await backend.save(str(tmp_path / "saved"), {})
        await backend.stop()
    finally:
        await processes.stop_all()
    for name, value in alone._model.tensors():
        torch.testing.assert_close(published[name], value, atol=2e-5, rtol=0)
    resumed = FsdpWorker(RankSettings(FsdpSettings(model, "", **common), 0, "", ""))
    assert resumed.boot(str(tmp_path / "saved")) == 1
    for name, value in resumed._model.tensors():
        assert torch.equal(value, published[name]), name
