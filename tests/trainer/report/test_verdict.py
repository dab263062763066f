from __future__ import annotations

from typing import Any

import pytest

from tide_sdk.statistics import wilson
from tide_trainer.report.summary import summarise
from tide_trainer.report.verdict import breached, checks, key_figures, verdict


def evaluation(version: int, success: float, *, num: int = 200, **fields: Any) -> dict[str, Any]:
    return {
        "event": "evaluation",
        "model_version": version,
        "kind": "sampled",
        "success": success,
        "num": num,
        "num_total": 200,
        "partial": False,
        **fields,
    }


def run(target: float = 0.9, **settings: Any) -> dict[str, Any]:
    return {
        "event": "run",
        "name": "q",
        "config": {"run": {"target_success": target, "max_train_steps": 30}, **settings},
    }


def end(status: str = "completed", reason: str = "", **fields: Any) -> dict[str, Any]:
    return {"event": "end", "status": status, "reason": reason, **fields}


def steps(num: int) -> list[dict[str, Any]]:
    return [{"event": "train_step", "model_version": version} for version in range(1, num + 1)]


def test_a_run_that_learned() -> None:
    found = verdict(summarise([run(), evaluation(0, 0.52), *steps(22), evaluation(22, 0.93), end()]))
    assert found == (
        "The agent got better: sampled success on 200 held-out seeds rose from 52% to 93% in 22 train steps, "
        "and the target of 90% was reached."
    )


def test_a_run_that_learned_too_little() -> None:
    found = verdict(summarise([run(), evaluation(0, 0.52), *steps(30), evaluation(30, 0.8), end()]))
    assert found.endswith("rose from 52% to 80% in 30 train steps, and the target of 90% was not reached.")


def test_a_change_within_sampling_noise_is_called_so() -> None:
    found = verdict(summarise([run(0), evaluation(0, 0.52), evaluation(1, 0.56), end()]))
    assert found == (
        "Sampled success on 200 held-out seeds went from 52% to 56%, within sampling noise in 1 train step."
    )


def test_a_run_that_got_worse() -> None:
    assert "the agent got worse" in verdict(summarise([evaluation(0, 0.9), evaluation(5, 0.3), end()])).lower()


@pytest.mark.parametrize(
    ("status", "start"),
    [
        ("failed", "The run failed after 5 train steps (rank lost); the agent got better"),
        ("stopped", "The run was stopped after 5 train steps (rank lost); the agent got better"),
    ],
)
def test_a_run_that_ended_early_says_why_and_what_it_reached(status: str, start: str) -> None:
    records = [evaluation(0, 0.5), *steps(5), evaluation(5, 0.7), end(status, "rank lost.")]
    assert verdict(summarise(records)).startswith(start)


def test_a_run_without_an_end() -> None:
    found = verdict(summarise([{"event": "phase", "phase": "training"}, *steps(3)]))
    assert found == (
        "The run has no recorded end: it still goes on, or it was killed in the phase “training” after 3 train steps; "
        "success on held-out seeds was never evaluated, so nothing can be said about learning."
    )


def test_evaluations_that_were_cut_short_do_not_judge() -> None:
    records = [evaluation(0, 0.5), evaluation(5, 0.9), evaluation(6, 0.2, num=9, partial=True), end()]
    assert "rose from 50% to 90%" in verdict(summarise(records))


def test_a_whole_evaluation_is_not_replaced_by_one_that_was_cut_short() -> None:
    records = [evaluation(5, 0.9), evaluation(5, 0.2, num=9, partial=True)]
    assert [point.success for point in summarise(records).sampled] == [0.9]
    assert [point.success for point in summarise(records[::-1]).sampled] == [0.9]


def test_an_evaluation_that_was_repeated_counts_once_and_the_last_wins() -> None:
    assert [point.success for point in summarise([evaluation(5, 0.9), evaluation(5, 0.8)]).sampled] == [0.8]


def test_the_wilson_interval() -> None:
    low, high = wilson(0.5, 200)
    assert low == pytest.approx(0.4314, abs=1e-4)
    assert high == pytest.approx(0.5686, abs=1e-4)
    assert wilson(1.0, 200)[1] == 1.0
    assert wilson(0.0, 10)[0] == 0.0


def states(*records: dict[str, Any]) -> list[str]:
    return [check.state for check in checks(summarise(list(records)))]


def test_invariants_that_hold() -> None:
    good = end(
        account={"trained": 480, "dropped: all equal": 3},
        largest_staleness=1,
        eta=1,
        parity_max_abs=1e-5,
        parity_tolerance=1e-3,
    )
    assert states(good) == ["OK", "OK", "OK", "not recorded"]
    assert checks(summarise([good]))[0].measured == "480 trained + 3 dropped = 483 prompts (dropped: all equal 3)"


def test_invariants_that_were_not_recorded() -> None:
    assert states() == ["not recorded"] * 4
    assert states(end(account=None, eta="one", largest_staleness=None, parity_max_abs=1.0)) == ["not recorded"] * 4


@pytest.mark.parametrize(
    ("fields", "index"),
    [
        ({"account": {"trained": 5, "lost": 1}}, 0),
        ({"account": {"trained": 5}, "num_prompts": 6}, 0),
        ({"largest_staleness": 2, "eta": 1}, 1),
        ({"parity_max_abs": 0.1, "parity_tolerance": 0.01}, 2),
    ],
)
def test_a_breach_is_found(fields: dict[str, Any], index: int) -> None:
    assert states(end(**fields))[index] == "breach"
    assert len(breached(summarise([end(**fields)]))) == 1


def test_one_train_step_beyond_the_bound_is_a_breach_whatever_the_end_says() -> None:
    late = {"event": "train_step", "model_version": 4, "staleness_max": 3}
    assert states(late, end(largest_staleness=1, eta=1))[1] == "breach"


def test_key_figures_of_an_empty_run_are_dashes() -> None:
    figures = {figure.label: figure.value for figure in key_figures(summarise([]))}
    assert figures["Sampled success"] == "–"
    assert figures["Train steps"] == "0"
    assert figures["Peak memory"] == "–"


def test_fields_of_wrong_types_are_left_out() -> None:
    strange = {
        "event": "train_step",
        "model_version": "x",
        "loss": [],
        "cpu_s": 3,
        "hit_rate": True,
        "success": 10**400,
    }
    odd = [{"event": "run", "config": [1]}, {"event": "evaluation", "kind": "sampled", "success": "high"}, {}]
    summary = summarise([strange, *odd, end(account={"trained": None}, cpu_s={"a": "b"})])
    assert summary.steps[0]["model_version"] == 1
    assert summary.sampled == ()
    assert summary.cpu_s == {}
    assert key_figures(summary)
    assert verdict(summary)


def alarm(state: str = "raised", kind: str = "above") -> dict[str, Any]:
    return {"event": "alarm", "state": state, "rank": "rollout:0", "kind": kind, "message": "40 tokens too many"}


def footprints(*records: dict[str, Any], interval_s: float = 1.0) -> tuple[str, str]:
    watched = run(rollout={"watch": {"interval_s": interval_s}})
    found = next(check for check in checks(summarise([watched, *records, end()])) if "Footprints" in check.rule)
    return found.state, found.measured


def test_belief_and_measurement_that_part_are_a_breach_also_when_they_met_again() -> None:
    assert footprints() == ("OK", "no alarm; every rank was looked at each 1 s")
    assert footprints(interval_s=0)[0] == "not recorded"
    state, words = footprints(alarm(), alarm("cleared"), alarm(kind="evicted"))
    assert state == "breach"
    assert words == "alarms: above 1, evicted 1; the last one: 40 tokens too many"


def test_t7_a_run_without_capacity_data_is_a_breach() -> None:
    assert footprints({"event": "readiness", "ready": False}, {"event": "readiness", "ready": True}) == (
        "breach",
        "no rank said what its cache held, 1 times",
    )
