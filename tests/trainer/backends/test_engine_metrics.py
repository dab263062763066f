"""What an engine cannot read is not exported as a number."""

from __future__ import annotations

from tide_trainer.backends.engine_metrics import prometheus_text
from tide_trainer.engine_client import EngineHealth
from tide_trainer.types import EngineStats

STATS = dict.fromkeys(EngineStats.__dataclass_fields__, 0)


def exported(**changes: int) -> dict[str, str]:
    text = prometheus_text(EngineStats(**{**STATS, **changes}), EngineHealth(3, True, 4096, 32, 1024))
    return dict(line.split() for line in text.splitlines() if not line.startswith("#"))


def test_free_and_used_tokens_make_up_the_cache() -> None:
    found = exported(kv_used_tokens=96)
    assert (found["tide_engine_kv_used_tokens"], found["tide_engine_kv_free_tokens"]) == ("96", "4000")


def test_t7_unreadable_counts_are_absent_and_not_zero() -> None:
    found = exported(kv_used_tokens=-32, num_running=-1, num_waiting=-1)
    assert not {name for name in found if "kv_used" in name or "kv_free" in name or "requests" in name}
    assert found["tide_engine_serving"] == "1"
