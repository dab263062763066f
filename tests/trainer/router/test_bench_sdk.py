"""`make bench-sdk` in small: both sides are played to the end, and queued calls are all answered."""

from __future__ import annotations

import bench_sdk


async def test_both_sides_play_the_same_number_of_turns_and_each_call_is_captured(tmp_path, monkeypatch):
    for name, value in (("NUM_TASKS", 3), ("NUM_TURNS", 4), ("TOKEN_LATENCY_S", 0.001)):
        monkeypatch.setattr(bench_sdk, name, value)
    told = await bench_sdk._overhead(tmp_path / "overhead", 1)
    assert told["num_turns"] == {"direct": 12, "stack": 12}
    assert told["cpu_ms_a_turn"]["direct"]["router"] == 0.0
    # The kernel counts CPU time in hundredths of a second: so few turns may cost none.
    assert told["cpu_ms_a_turn"]["stack"].keys() == {"sdk and grants", "router", "engine"}


async def test_calls_beyond_what_the_client_lets_out_wait_and_are_all_answered(tmp_path):
    cpu_ms = await bench_sdk._queued(tmp_path / "queued", 60, max_in_flight=8)
    assert cpu_ms.keys() == {"sdk and grants", "router", "engine"}
