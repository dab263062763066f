"""P(t) as tiers and as a weighted sum; predicted footprints."""

from __future__ import annotations

import itertools

from tide_trainer.scheduling.growth import GrowthPredictor
from tide_trainer.scheduling.priority import Key, waiting_key
from tide_trainer.scheduling.settings import CtbSettings, FootprintPrior, PriorityWeights


def key(settings: CtbSettings, *, ev=False, completion=0.0, active=False, order=0, context=0, since=None) -> Key:
    return waiting_key(
        settings,
        is_eval=ev,
        completion=completion,
        active=active,
        order_key=order,
        context_tokens=context,
        starved_since_s=since,
    )


def test_tiers_are_lexicographic() -> None:
    settings = CtbSettings()
    best_first = [
        key(settings, ev=True, since=3.0),
        key(settings, ev=True, completion=0.9),
        key(settings, ev=True),
        key(settings, since=3.0),
        key(settings, since=4.0, completion=1.0, active=True, context=9000),
        key(settings, completion=0.5),
        key(settings, completion=0.4, active=True, context=9000),
        key(settings, active=True, order=9),
        key(settings, order=-1),
        key(settings, context=4000),
        key(settings, context=100),
    ]
    assert best_first == sorted(best_first)
    assert len(set(best_first)) == len(best_first)


def test_the_default_weights_keep_the_order_of_whole_tiers() -> None:
    settings = CtbSettings(priority="weighted")
    terms = list(itertools.product([False, True], [0.0, 1.0], [False, True], [0, 8192]))
    scores = [key(settings, ev=ev, completion=c, active=a, context=n) for ev, c, a, n in terms]
    assert scores == sorted(scores, reverse=True)


def test_weights_are_configuration_and_age_still_promotes() -> None:
    settings = CtbSettings(priority="weighted", weights=PriorityWeights(evaluation=0.0, context=100.0))
    assert key(settings, context=8192) < key(settings, ev=True, completion=1.0, active=True)
    assert key(settings, context=80_000) == key(settings, context=8192)
    assert key(settings, since=1.0) < key(settings, since=2.0) < key(settings, context=8192)


def test_predictions_start_from_the_prior_and_follow_what_is_measured() -> None:
    settings = CtbSettings(
        growth_fraction=0.5,
        prediction_weight=0.1,
        default_prior=FootprintPrior(prompt_tokens=100),
        priors={"maze": FootprintPrior(prompt_tokens=10, final_tokens=50)},
    )
    growth = GrowthPredictor(settings)
    assert growth.first_call_tokens("shop", None) == 100
    assert growth.first_call_tokens("maze", None) == 10
    assert growth.remaining_tokens("shop", 200) == 100
    assert growth.remaining_tokens("maze", 20) == 15
    assert growth.remaining_tokens("maze", 200) == 0
    for _ in range(100):
        growth.observe_first_call("shop", 40, 8)
        growth.observe_final("shop", 400)
    assert growth.first_call_tokens("shop", None) == 48
    assert growth.first_call_tokens("shop", 30) == 38
    assert growth.remaining_tokens("shop", 200) == 100
    assert growth.remaining_tokens("shop", 200, 280) == 40
    assert growth.remaining_tokens("shop", 500) == 0


def test_a_context_is_compared_with_those_that_got_longer() -> None:
    growth = GrowthPredictor(CtbSettings())
    assert growth.known_final_tokens("shop", 10) is None
    for final in (100, 200, 600):
        growth.observe_final("shop", final)
    finals = {tokens: growth.known_final_tokens("shop", tokens) for tokens in (50, 100, 200, 599, 600, 700)}
    assert finals == {50: 300, 100: 400, 200: 600, 599: 600, 600: 600, 700: 700}


def test_predictions_forget() -> None:
    growth = GrowthPredictor(CtbSettings())
    for final in [4000] * 50 + [1000] * 64:
        growth.observe_final("shop", final)
    assert growth.remaining_tokens("shop", 1) == 999


def test_finished_siblings_say_more_than_the_environment(situation) -> None:
    made = situation()
    made.start("long", 500)
    made.on_end("long", 0.0)
    made.start("g/0", 50, siblings=2)
    assert made.predicted_tokens("g/0") == 510
    made.add("g/1", siblings=2)
    made.plan(0.0)
    made.on_end("g/0", 0.0)
    assert made.predicted_tokens("g/1") == 60
