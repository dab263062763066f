"""`tide-env check` finds what is wrong: each fault of a server fails the check that is about it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import small_environment
from small_environment import SmallServer

from tide_sdk.check import cases_ends
from tide_sdk.check.case import Plan
from tide_sdk.check.launched import Launched
from tide_sdk.check.run import run_checks, select
from tide_sdk.check.subject import Reached

PLAN = Plan(
    actions=tuple({"role": "assistant", "content": words} for words in ("hello", "image", "large")),
    end_actions=({"role": "assistant", "content": "bye"},),
    slow_action={"role": "assistant", "content": "slow"},
    timeout_s=30.0,
)
FAULTS = {
    "acts_when_repeated": "turn.repeat",
    "acts_for_each_call": "turn.concurrent",
    "stops_with_its_caller": "turn.dropped",
    "conflict_unnoticed": "turn.conflict",
    "forgets_at_the_end": "turn.every_state",
    "reward_is_a_string": "turn.answer",
    "compares_ascii": "message.exact",
    "composes_text": "message.text",
    "reason_in_ascii": "message.reason",
    "small_bodies": "message.large",
    "spoils_images": "observation.images",
    "timers_run_while_paused": "pause.timers",
    "stale_epochs_apply": "pause.epochs",
    "acts_while_paused": "pause.turns",
    "no_idle_clock": "clock.idle",
    "no_turn_clock": "clock.turn",
    "reads_extend": "clock.idle",
    "ends_after_the_action": "end.acting",
    "another_account_each_time": "end.repeat",
    "keys_start_anew": "start.repeat",
    "any_body_for_a_key": "start.key_conflict",
    "never_full": "capacity.full",
    "resumes_begin_anew": "pause.clocks",
    "done_holds_its_place": "end.done",
    "older_keeps_its_place": "capacity.full",
    "forgets_starts_at_the_end": "start.repeat",
    "mixes_tasks": "load.tasks",
    "no_contract_header": "http.header",
    "errors_are_html": "http.content_type",
    "closes_connections": "http.keep_alive",
    "no_codes": "errors.problem",
    "no_allow": "errors.method",
    "unknown_fields_pass": "errors.unknown_field",
    "any_media_type": "errors.media_type",
    "any_size": "errors.too_large",
}
FAULTS_OF_A_PROCESS = {
    "blocks_while_acting": "health.acting",
    "same_incarnation": "kill.lost",
    "keeps_lost_tasks": "kill.lost",
    "ignores_sigterm": "kill.stop",
    "dies_of_sigterm": "kill.stop",
}


async def check(subject, name):
    try:
        await subject.open()
        return await run_checks(subject, PLAN, select([name]), 60.0, lambda _result: None)
    finally:
        await subject.aclose()


@pytest.mark.parametrize(("fault", "name"), FAULTS.items())
async def test_a_fault_fails_the_check_that_is_about_it(uvicorn_server, monkeypatch, fault, name):
    monkeypatch.setattr(cases_ends, "LATE_S", 0.5)
    async with uvicorn_server(SmallServer(fault)) as url:
        (found,) = await check(Reached(url, 10.0), name)
    assert (found.case.name, found.result) == (name, "fail")
    assert found.detail
    assert found.exchanges


@pytest.mark.parametrize(("fault", "name"), FAULTS_OF_A_PROCESS.items())
async def test_a_fault_of_a_process_fails_the_check_that_is_about_it(tmp_path, monkeypatch, fault, name):
    monkeypatch.setattr("tide_sdk.check.cases_kills.STOP_S", 1.0)
    program = str(Path(small_environment.__file__))
    command = [sys.executable, program, "--uds", "{uds}", "--state", str(tmp_path / "state"), fault]
    (found,) = await check(Launched(command, 30.0, 4), name)
    assert (found.case.name, found.result) == (name, "fail")
    assert found.detail
