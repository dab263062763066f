"""The gateway's free slots become the scheduler's limits; without an answer the last known ones count."""

from __future__ import annotations

import pytest

from tide_sdk.errors import TideError
from tide_sdk.http import ConnectFailed
from tide_sdk.wire import CapacityView
from tide_trainer.loop.environment_watch import EnvironmentWatch


def view(mine=0, free=4, free_eval=4):
    return CapacityView(capacity=8, taken=mine, free=free, free_eval=free_eval, mine=mine, waiting=0, starts_per_s=0)


class Gateway:
    def __init__(self, *answers) -> None:
        self.answers = list(answers)

    async def capacity(self, *, deadline_s=None):
        assert deadline_s
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Shell:
    def __init__(self) -> None:
        self.told = []

    def set_environment_capacity(self, environment, limit, reserved_eval):
        self.told.append((environment, limit, reserved_eval))


async def looked(*answers, **options):
    shell = Shell()
    watch = EnvironmentWatch(Gateway(*answers), shell, ("maze",), **options)
    for _ in answers:
        await watch.look()
    return shell.told, watch


async def test_what_the_run_holds_and_what_is_free_is_its_limit():
    told, _ = await looked({"maze": view(mine=3, free=2, free_eval=2), "other": view()})
    assert told == [("maze", 5, 0)]


async def test_slots_are_reserved_by_the_gateway_or_by_the_run_whichever_is_more():
    told, _ = await looked({"maze": view(mine=1, free=4, free_eval=6)}, reserved_slots=1)
    assert told == [("maze", 7, 2)]
    told, _ = await looked({"maze": view(mine=1, free=4, free_eval=4)}, reserved_slots=3)
    assert told == [("maze", 5, 3)]
    told, _ = await looked({"maze": view(free=1, free_eval=1)}, reserved_slots=3)
    assert told == [("maze", 1, 1)]


async def test_a_reserve_that_evaluations_fill_is_remembered():
    told, _ = await looked({"maze": view(free=4, free_eval=6)}, {"maze": view(mine=2, free=4, free_eval=4)})
    assert told == [("maze", 6, 2), ("maze", 6, 2)]


@pytest.mark.parametrize("error", [ConnectFailed("x"), TideError("unavailable", "x"), TimeoutError()])
async def test_a_gateway_that_does_not_answer_keeps_the_last_known(error):
    told, watch = await looked({"maze": view()}, error, error, {"maze": view(free=1, free_eval=1)})
    assert told == [("maze", 4, 0), ("maze", 1, 0)]
    assert watch.num_failed == 2


async def test_an_environment_that_the_gateway_does_not_know_gets_no_limit():
    told, _ = await looked({}, {})
    assert told == []


async def test_an_interval_of_0_never_looks():
    await EnvironmentWatch(Gateway(), Shell(), ("maze",), interval_s=0).run()


async def test_each_silence_of_the_gateway_is_told_once(caplog):
    late = ConnectFailed("away")
    _, watch = await looked(late, late, {"maze": view()}, late)
    assert watch.num_failed == 3
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
