"""Raw prompts are captured as exactly as chats: they extend what their text or ids continue, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_trainer import types
from tide_trainer.router.replies import read_reply
from tide_trainer.router.sessions import Capture

COMPLETIONS = "/sessions/s/v1/completions"


def commit(capture, renderer, turn, ids, stop=()):
    ids = tuple(ids)
    reply = read_reply(renderer, turn.expected, types.Completion(ids, (-0.5,) * len(ids), 0, "stop"), stop)
    capture.commit(turn, reply, 1)
    return reply


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet="ago left\n<é", max_size=12), min_size=1, max_size=4),
    replies=st.lists(st.lists(st.integers(10, 320), min_size=1, max_size=6), min_size=4, max_size=4),
    as_ids=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_a_prompt_of_all_ids_so_far_never_breaks(pieces, replies, as_ids, renderers):
    renderer = renderers["chatml"]
    capture = Capture(renderer)
    ids: list[int] = []
    for piece, reply, raw in zip(pieces, replies, as_ids, strict=False):
        added = renderer.encode_after("you" + piece)
        text = renderer.decode_after([*ids, *added])
        exact = "\ufffd" not in text
        turn = capture.plan_text(text) if raw and exact else capture.plan_ids([*ids, *added])
        if not raw or not exact:
            assert turn.prompt_ids == [*ids, *added]
        commit(capture, renderer, turn, reply)
        ids = [*turn.prompt_ids, *reply]
        (segment, *_) = capture.segments()
        assert list(capture.segments()[-1].token_ids) == ids
    assert segment.token_ids
    assert capture.num_breaks == len(capture.segments()) - 1


def test_text_without_the_sampled_end_token_is_a_break(renderers):
    renderer = renderers["chatml"]
    capture = Capture(renderer)
    sampled = [*renderer.encode("go left"), *renderer.stop_token_ids]
    commit(capture, renderer, capture.plan_text("you see"), sampled)
    assert capture.plan_text("you see" + "go left" + " a ball").segment is None
    assert capture.plan_text("you see" + "go left<|im_end|>" + " a ball").segment is not None


def test_a_stop_string_is_continued_only_where_it_stands(renderers):
    renderer = renderers["chatml"]
    capture = Capture(renderer)
    commit(capture, renderer, capture.plan_text("you"), renderer.encode("go task"), stop=("task",))
    assert capture.plan_text("you" + "go " + "ball").segment is None
    assert capture.plan_text("you" + "go task" + " ball").segment is not None


def test_an_id_that_no_token_has_is_named(renderers):
    with pytest.raises(ValueError, match=r"prompt\[1\]: the tokenizer has no token 999999"):
        Capture(renderers["chatml"]).plan_ids([10, 999_999])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [999_999]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"n": 2}, "n"),
        ({"logprobs": 5}, "logprobs"),
        ({"temperature": 0}, "temperature"),
        ({"top_k": 5}, "top_k"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_bad_completions_name_the_field(change, param, router):
    router.engine(lambda _: router.renderer.stop_token_ids)
    router.open()
    status, body = await router.call("POST", COMPLETIONS, {"prompt": "you"} | change)
    assert (status, json.loads(body)["error"]["param"]) == (400, param)
    assert router.events == []


@pytest.mark.parametrize("prompt", ["you", ["you"], [[10, 11]], [10, 11]])
async def test_prompts_of_all_forms(prompt, router):
    router.engine(lambda _: router.renderer.stop_token_ids)
    router.open()
    status, body = await router.call("POST", COMPLETIONS, {"prompt": prompt})
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, "")
