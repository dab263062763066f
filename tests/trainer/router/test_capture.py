"""What is captured is exactly what the engine was sent and what it sampled."""

from __future__ import annotations

import random

import pytest
from captured_play import Play, check_books
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_trainer import types
from tide_trainer.router.replies import Expected, Reply, read_reply
from tide_trainer.router.sessions import Capture
from tide_trainer.segments import read_segment, segment_data


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_s6_a_hand_written_mask_of_three_turns(renderers):
    play = Play(renderers["word"])
    word = {
        text: renderers["word"].encode(text)[0]
        for text in ("<user>", "<assistant>", "<end>", "you", "go", "left", "yes")
    }
    talk = [user("you")]
    for ids in (["go", "<end>"], ["left", "<end>"], ["go", "left"]):
        reply = play.turn(talk, [word[i] for i in ids], reason="stop" if ids[-1] == "<end>" else "length")
        talk = [*talk, assistant(reply), user("yes")]
    (segment,) = play.capture.segments()
    names = {number: text for text, number in word.items()}
    assert " ".join(names[i] for i in segment.token_ids) == (
        "<user> you <assistant> go <end> <user> yes <assistant> left <end> <user> yes <assistant> go left"
    )
    assert [int(s) for s in segment.sampled] == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]


def test_a_reply_cut_by_length_gets_the_templates_end(renderers):
    renderer = renderers["chatml"]
    play = Play(renderer)
    reply = play.turn([user("you")], renderer.encode("go left"), reason="length")
    play.turn([user("you"), assistant(reply), user("yes")], [*renderer.encode("go"), *renderer.stop_token_ids])
    (segment,) = play.capture.segments()
    text = "".join(renderer.token_text(i) for i in segment.token_ids)
    assert text == (
        "<|im_start|>user\nyou<|im_end|>\n<|im_start|>assistant\ngo left<|im_end|>\n"
        "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\ngo<|im_end|>"
    )
    check_books(play)


@pytest.mark.parametrize("name", ["chatml", "qwen", "mistral", "metaspace", "word"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_sampled_ids_survive_in_any_conversation(name, data, renderers):
    renderer = renderers[name]
    size = renderer._tokenizer.get_vocab_size()
    play, talk = Play(renderer), [user(data.draw(st.text(max_size=12)))]
    version = 0
    for _ in range(data.draw(st.integers(1, 6))):
        ids = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
        if stopped := data.draw(st.booleans()):
            ids = [i for i in ids if i not in renderer.stop_token_ids] + list(renderer.stop_token_ids[:1])
        version += data.draw(st.integers(0, 1))
        reply = play.turn(talk, ids, version, "stop" if stopped else "length")
        talk = [*talk, assistant(reply), user(data.draw(st.text(max_size=12)))]
        if data.draw(st.integers(0, 9)) == 0:
            talk = talk[-1:]  # the agent forgets
    check_books(play)


def test_s1_ids_that_encoding_would_merge_stay_apart(renderers):
    renderer = renderers["chatml"]
    letters = [i for letter in "hello" for i in renderer.encode(letter)]
    assert renderer.encode("hello") != letters
    play = Play(renderer)
    talk = [user("you")]
    for _ in range(3):
        reply = play.turn(talk, [*letters, *renderer.stop_token_ids])
        assert reply == "hello"
        talk = [*talk, assistant(reply), user("yes")]
    (segment,) = play.capture.segments()
    assert sum(segment.sampled) == 3 * 6
    check_books(play)


@pytest.mark.parametrize("name", ["chatml", "qwen", "llama", "metaspace", "word", "thinking"])
def test_where_encoding_gives_the_ids_back_the_prompt_is_the_freshly_rendered_one(name, renderers):
    renderer, rng = renderers[name], random.Random(1)
    play, talk = Play(renderer), [user("you see a red ball")]
    for _ in range(5):
        words = " ".join(rng.choices(["go", "left", "right", "forward"], k=3))
        # Mistral's template writes a space before a reply, which its tokenizer drops where the text begins.
        ids = renderer.encode_after(" " + words if name == "metaspace" else words)
        reply = play.turn(talk, [*ids, *renderer.stop_token_ids])
        assert reply == words
        assert play.books[-1][0] == renderer.encode(renderer.render(talk))
        talk = [*talk, assistant(reply), user("yes")]
    assert play.capture.num_breaks == 0
    check_books(play)


def test_a_template_that_drops_old_thinking_breaks_the_segment(renderers):
    renderer = renderers["thinking"]
    play, talk = Play(renderer), [user("you")]
    for _ in range(3):
        ids = [*renderer.encode("<think>\nred ball\n</think>\n\ngo"), *renderer.stop_token_ids]
        reply = play.turn(talk, ids)
        talk = [*talk, assistant(reply), user("yes")]
    assert play.capture.num_breaks == 2
    assert len(play.capture.segments()) == 3
    check_books(play)


def test_a_template_that_trims_the_reply_breaks_the_segment(renderers):
    renderer = renderers["llama"]
    play = Play(renderer)
    reply = play.turn([user("you")], [*renderer.encode("go left \n"), *renderer.stop_token_ids])
    play.turn([user("you"), assistant(reply), user("yes")], renderer.encode("go"), reason="length")
    assert len(play.capture.segments()) == 2
    check_books(play)


@pytest.mark.parametrize("edit", ["reply", "history", "shorter"])
def test_an_agent_that_edits_its_history_breaks_the_segment(edit, renderers):
    renderer = renderers["chatml"]
    play = Play(renderer)
    stop = renderer.stop_token_ids
    reply = play.turn([user("you"), user("see")], [*renderer.encode("go"), *stop])
    talk = {
        "reply": [user("you"), user("see"), assistant(reply + "!"), user("yes")],
        "history": [user("You"), user("see"), assistant(reply), user("yes")],
        "shorter": [user("see"), assistant(reply), user("yes")],
    }[edit]
    play.turn(talk, [*renderer.encode("go"), *stop])
    assert len(play.capture.segments()) == 2
    check_books(play)


def test_two_conversations_of_one_agent_both_grow(renderers):
    renderer = renderers["chatml"]
    play, ids = Play(renderer), [*renderer.encode("go"), *renderer.stop_token_ids]
    talks = [[user("left")], [user("right")]]
    for turn in range(6):
        talk = talks[turn % 2]
        talk += [assistant(play.turn(talk, ids)), user("yes")]
    assert len(play.capture.segments()) == 2
    assert [sum(s.sampled) for s in play.capture.segments()] == [3 * len(ids)] * 2
    check_books(play)


def test_a_second_sample_of_the_same_messages_is_a_segment_of_its_own(renderers):
    renderer = renderers["chatml"]
    play = Play(renderer)
    for word in ("go", "left", "go"):
        play.turn([user("you")], [*renderer.encode(word), *renderer.stop_token_ids])
    assert len(play.capture.segments()) == 3
    check_books(play)


def test_a_stop_string_cuts_the_sample_where_it_is_complete(renderers):
    renderer = renderers["chatml"]
    ids = renderer.encode("go left\nObservation: red ball")
    play = Play(renderer)
    content = play.turn([user("you")], ids, reason="length", stop=("\nObs", "never"))
    assert content == "go left"
    kept = play.books[0][1]
    assert kept == tuple(ids[: len(kept)])
    assert "\nObs" in renderer.decode(kept)
    assert "\nObs" not in renderer.decode(kept[:-1])
    play.turn([user("you"), assistant(content), user("yes")], renderer.encode("go"))
    check_books(play)


def test_an_engine_whose_lists_differ_is_not_captured(renderers):
    for ids, logprobs in (((1, 2), (0.0,)), ((), ())):
        with pytest.raises(ValueError, match="log-probs"):
            read_reply(renderers["word"], Expected(), types.Completion(ids, logprobs, 0, "stop"), ())


def test_segments_cross_the_channel(renderers):
    play = Play(renderers["word"])
    play.turn([user("you")], [8, 2])
    (segment,) = play.capture.segments()
    assert read_segment(segment_data(segment)) == segment
    with pytest.raises(ValueError, match="differ in length"):
        read_segment(segment_data(segment) | {"sampled": [True]})


def test_a_plan_that_is_not_committed_changes_nothing(renderers):
    capture = Capture(renderers["word"])
    planned = capture.plan([user("you")])
    assert capture.segments() == []
    capture.commit(planned, Reply((8,), (-1.0,), "left", "length"), 3)
    before = capture.segments()
    capture.plan([user("you"), assistant("left"), user("yes")])
    assert capture.segments() == before


@pytest.mark.parametrize("name", ["chatml", "llama", "word"])
@pytest.mark.parametrize("edit", [{0: "task yes"}, {2: "you left"}, {0: "task yes", 2: "you left"}])
def test_s1_an_edit_of_the_same_length_breaks_though_the_replies_stand_in_their_places(name, edit, renderers):
    renderer = renderers[name]
    play = Play(renderer)
    ids = [*renderer.encode_after("forward"), *renderer.stop_token_ids]
    talk = [{"role": "user", "content": "go right"}]
    for _ in range(2):
        said = play.turn(talk, ids)
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "see ball"}]
    edited = [one | {"content": edit.get(place, one["content"])} for place, one in enumerate(talk)]
    assert [len(one["content"]) for one in edited] == [len(one["content"]) for one in talk]
    play.turn(edited, ids)
    assert play.capture.num_breaks == 1
    check_books(play)
