from __future__ import annotations

from typing import Any

import pytest

from tide_trainer.report.summary import summarise
from tide_trainer.report.turn_cpu import turn_cpu
from tide_trainer.report.verdict import key_figures


def train_step(**fields: Any) -> dict[str, Any]:
    cpu_s = {"main": 0.5, "router": 0.3, "gateway": 0.6, "engine": 1.0}
    return {"event": "train_step", "num_turns": 1000, "scheduler_cpu_s": 0.1, "cpu_s": cpu_s, **fields}


def test_a_turn_costs_the_cpu_of_the_train_steps_over_their_turns() -> None:
    more = train_step(num_turns=3000, cpu_s={"main": 0.5, "router": 0.9, "gateway": 1.0, "training": 4.0})
    found = turn_cpu([train_step(), {"event": "evaluation", "num": 5}, more])
    assert found is not None
    assert found.num_turns == 4000
    assert found.parts_ms == pytest.approx(
        {"training": 1.0, "gateway": 0.4, "router": 0.3, "engine": 0.25, "main": 0.2, "scheduler": 0.05}
    )
    assert list(found.parts_ms) == ["training", "gateway", "router", "engine", "main", "scheduler"]
    assert found.serving_ms == pytest.approx(0.75)


def test_it_is_told_with_the_goal_and_every_part() -> None:
    found = turn_cpu([train_step()])
    assert found is not None
    assert found.told() == (
        "CPU of a turn: scheduler 0.10 + router 0.30 + gateway 0.60 = 1.00 ms (goal: at most 2); "
        "engine 1.00, main 0.40 ms"
    )


@pytest.mark.parametrize(
    "broken",
    [{}, {"num_turns": 0}, {"num_turns": -5}, {"num_turns": "many"}, {"cpu_s": None}, {"cpu_s": {"main": "much"}}],
)
def test_train_steps_without_turns_or_cpu_do_not_count(broken: dict[str, Any]) -> None:
    odd = {"event": "train_step"} if not broken else train_step(**broken)
    assert turn_cpu([odd]) is None
    found = turn_cpu([odd, train_step()])
    assert found is not None
    assert found.num_turns == 1000


def test_the_report_has_it_among_its_key_figures() -> None:
    figures = {figure.label: figure for figure in key_figures(summarise([train_step()]))}
    assert figures["CPU of a turn"].value == "1.00 ms"
    assert figures["CPU of a turn"].note == "scheduler, router and gateway; goal: at most 2 ms"
    assert {figure.label: figure.value for figure in key_figures(summarise([]))}["CPU of a turn"] == "–"


def test_the_schedulers_own_cpu_is_a_figure_with_its_goal() -> None:
    found = turn_cpu([train_step()])
    assert found is not None
    assert found.scheduler_ms == pytest.approx(0.1)
    figures = {figure.label: figure for figure in key_figures(summarise([train_step()]))}
    assert (figures["Scheduling a turn"].value, figures["Scheduling a turn"].note) == (
        "0.100 ms",
        "CPU; goal: at most 0.1 ms",
    )
