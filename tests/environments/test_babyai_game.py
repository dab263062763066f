"""The game in words: rewards, endings, determinism, the vocabulary, and the expert."""

from __future__ import annotations

import random
from importlib.resources import files

import pytest

from tide_environments.babyai import ACTIONS, words
from tide_environments.babyai.game import Game, Played, UnknownLevel, levels

GO_TO = "BabyAI-GoToObj-v0"


def play(game: Game, choose) -> tuple[Played, list[str]]:
    """Plays to the end; returns the last answer and everything that was said."""
    said = [game.text]
    while True:
        played = game.act(choose(game))
        said.append(played.text)
        if played.terminated or played.truncated:
            return played, said


def expert(game: Game) -> str:
    assert game.expert_action is not None
    return game.expert_action


@pytest.mark.parametrize("level", [GO_TO, "BabyAI-GoToLocal-v0"])
def test_the_expert_solves_the_go_to_levels_within_20_turns(level):
    for seed in range(20):
        game = Game(level, seed, expert=True)
        played, said = play(game, expert)
        assert played.success
        assert played.terminated
        assert not played.truncated
        assert played.reward == pytest.approx(1 - 0.9 * game.turns / 20)
        assert said[-1] == "success"
        assert game.expert_action is None


def test_the_same_seed_and_actions_give_the_same_episode():
    def story(seed):
        rng = random.Random(5)
        return play(Game("BabyAI-GoToLocal-v0", seed), lambda _: rng.choice(ACTIONS))[1]

    assert story(3) == story(3)
    assert story(3) != story(4)


def test_the_bot_does_not_change_the_episode():
    def story(with_bot):
        rng = random.Random(1)
        return play(Game("BabyAI-GoToLocal-v0", 8, expert=with_bot), lambda _: rng.choice(ACTIONS[:3]))[1]

    assert story(True) == story(False)


def test_every_word_that_any_level_says_is_in_the_vocabulary():
    vocabulary = set(words())
    rng = random.Random(0)
    for level in levels():
        for seed in range(2):
            _, said = play(Game(level, seed), lambda _: rng.choice([*ACTIONS, "forward", "nonsense"]))
            assert set(" ".join(said).split()) <= vocabulary, level


def test_the_shipped_word_list_is_the_vocabulary():
    shipped = files("tide_environments.babyai").joinpath("words.txt").read_text("utf-8").split()
    assert tuple(shipped) == words()
    assert len(set(shipped)) == len(shipped)


def test_an_unknown_word_costs_a_turn_and_changes_nothing_else():
    game, untouched = Game(GO_TO, 3), Game(GO_TO, 3)
    played = game.act("fly away")
    assert not played.valid
    assert played.reward == 0
    assert not played.terminated
    assert played.text == "unknown . " + untouched.text.split(" . ")[1]
    assert game.turns == 1
    assert game.act("forward").text == untouched.act("forward").text


def test_an_action_word_may_have_spaces_and_capitals():
    assert Game(GO_TO, 3).act("  Forward\n").valid


def test_turns_used_up_truncate_without_reward():
    played, said = play(Game(GO_TO, 3, max_turns=3), lambda _: "done")
    assert (played.truncated, played.terminated, played.reward, played.success) == (True, False, 0.0, False)
    assert len(said) == 4
    assert said[-1] == "timeout"
    assert play(Game(GO_TO, 3, max_turns=2), lambda _: "what")[0].truncated


def test_a_mission_that_can_no_longer_succeed_ends_as_failure():
    # The strict levels fail on a wrong pick-up; some seed of a random walk meets that.
    rng = random.Random(0)
    ends = [play(Game("BabyAI-PickupDist-v0", s, max_turns=200), lambda _: rng.choice(ACTIONS[:4])) for s in range(12)]
    failed = [played for played, said in ends if said[-1] == "failure"]
    assert all(p.terminated and not p.success and p.reward == 0 for p in failed)


def test_a_wall_is_told_only_where_it_blocks_the_way():
    game = Game(GO_TO, 3)
    while (text := game.act("forward").text) != "success" and "wall" not in text:
        assert game.turns < 9
    assert "wall ahead 1" in text


def test_a_bot_that_fails_leaves_the_episode_whole(monkeypatch):
    game = Game(GO_TO, 3, expert=True)
    monkeypatch.setattr(game._bot, "replan", lambda _: 1 / 0)
    assert game.act("left").valid
    assert game.expert_action is None
    assert game.expert_failed
    assert game.act("left").valid


def test_levels_print_nothing(capsys):
    for seed in range(3):
        Game("BabyAI-GoToLocal-v0", seed)
        Game("BabyAI-BossLevel-v0", seed)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize("level", ["BabyAI-Nowhere-v0", "CartPole-v1", ""])
def test_an_unknown_level_is_refused(level):
    with pytest.raises(UnknownLevel, match="level"):
        Game(level, 0)


@pytest.mark.parametrize("turns", [0, 1001])
def test_max_turns_out_of_range_is_refused(turns):
    with pytest.raises(ValueError, match="max_turns"):
        Game(GO_TO, 0, max_turns=turns)
