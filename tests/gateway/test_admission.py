"""Who may start now: the pure decision, on a model store with a manual clock."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from admission_store import Store, full_store, refused

from tide_gateway.admission import MAX_RETRY_S, Admit, Holding, Refuse, Rules, Snapshot, Ticket, Wish, decide, startable


def test_starts_are_admitted_up_to_the_capacity_and_the_rest_gets_a_ticket():
    store = full_store(2)
    answer = refused(store.ask("flood", "third"))
    assert (answer.reason, answer.retry_after_s) == ("capacity", 1.0)
    assert answer.ticket == Ticket("flood", "third", "train", store.now_s, store.now_s + 3.0)
    assert "place 1" in answer.detail


def test_a_slot_goes_to_who_asked_first_within_an_owner():
    store = full_store(1)
    for key in ("a", "b"):
        store.now_s += 0.1
        store.ask("flood", key)
    store.release("flood", "first0")
    assert refused(store.ask("flood", "b")).reason == "capacity"
    assert isinstance(store.ask("flood", "a"), Admit)


def test_a_repeated_call_keeps_its_place_and_renews_its_ticket():
    store = full_store(1)
    first = refused(store.ask("a", "k")).ticket
    store.now_s += 1.0
    again = refused(store.ask("a", "k")).ticket
    assert first is not None
    assert again is not None
    assert again.asked_s == first.asked_s
    assert again.expires_s == first.expires_s + 1.0


def test_a_freed_slot_goes_to_the_owner_that_holds_the_fewest():
    store = full_store(2)
    store.ask("flood", "more")
    store.now_s += 0.5
    store.ask("modest", "only")
    store.release("flood", "first0")
    assert refused(store.ask("flood", "more")).reason == "capacity"
    assert isinstance(store.ask("modest", "only"), Admit)


def test_each_slot_that_is_granted_ahead_counts_as_held():
    store = Store(Rules(capacity=4))
    for key in ("x0", "x1", "x2", "x3"):
        store.ask("x", key)
    for key in ("a0", "a1", "a2", "b0", "b1"):
        store.now_s += 0.01
        store.ask(key[0], key)
    for key in ("x0", "x1", "x2", "x3"):
        store.release("x", key)
    # a0, b0, a1, b1 have the four slots, in whatever order they come.
    assert refused(store.ask("a", "a2")).reason == "capacity"
    assert all(isinstance(store.ask(key[0], key), Admit) for key in ("b1", "a1", "b0", "a0"))


def test_owners_take_turns_at_a_single_slot_however_many_starts_one_has_waiting():
    store = full_store(1)
    for key in ("a", "b", "c"):
        store.now_s += 0.1
        store.ask("flood", key)
    store.now_s += 0.1
    store.ask("modest", "only")
    store.release("flood", "first0")
    started = store.ask("flood", "a")
    assert isinstance(started, Admit)
    assert started.mark == store.tickets["flood", ""]
    store.release("flood", "a")
    assert refused(store.ask("flood", "b")).reason == "capacity"
    assert isinstance(store.ask("modest", "only"), Admit)
    store.release("modest", "only")
    for key in ("b", "c"):
        assert isinstance(store.ask("flood", key), Admit)
        store.release("flood", key)
    # Nothing waits any more, so the mark went with the last start.
    assert store.tickets == {}


def test_train_tasks_leave_the_reserved_slots_and_eval_tasks_take_any():
    store = Store(Rules(capacity=3, eval_reserved=1))
    answers = [store.ask("a", f"t{number}") for number in range(3)]
    assert [type(answer) for answer in answers] == [Admit, Admit, Refuse]
    assert isinstance(store.ask("a", "e0", "eval"), Admit)
    store.release("a", "t0")
    del store.tickets["a", "t2"]
    assert isinstance(store.ask("a", "e1", "eval"), Admit)
    store.release("a", "e0")
    assert isinstance(store.ask("a", "t3"), Refuse) is False


def test_eval_waits_ahead_of_training_only_for_the_reserve():
    store = Store(Rules(capacity=2, eval_reserved=1))
    store.ask("a", "e0", "eval")
    store.ask("a", "t0")
    store.now_s += 0.1
    store.ask("a", "t1")
    store.now_s += 0.1
    store.ask("a", "e1", "eval")
    store.release("a", "e0")
    assert refused(store.ask("a", "t1")).reason == "capacity"
    assert isinstance(store.ask("a", "e1", "eval"), Admit)
    store.ask("a", "e2", "eval")
    store.release("a", "t0")
    assert refused(store.ask("a", "e2", "eval")).reason == "capacity"
    assert isinstance(store.ask("a", "t1"), Admit)


def test_a_reserved_slot_counts_as_held_for_the_shared_ones():
    store = full_store(4)
    for key, kind in (("a0", "eval"), ("a1", "train"), ("b0", "train")):
        store.now_s += 0.01
        store.ask(key[0], key, kind)
    store.rules = replace(store.rules, eval_reserved=1)
    store.release("flood", "first0")
    store.release("flood", "first1")
    assert refused(store.ask("a", "a1")).reason == "capacity"
    assert isinstance(store.ask("b", "b0"), Admit)


def test_an_owner_at_its_cap_is_refused_and_does_not_block_others():
    store = Store(Rules(capacity=8, owner_capacity=2))
    for number in range(2):
        store.ask("a", f"t{number}")
    answer = refused(store.ask("a", "t2"))
    assert answer.reason == "owner_capacity"
    assert answer.ticket is not None
    store.now_s += 0.1
    for number in range(2):
        assert isinstance(store.ask("b", f"t{number}"), Admit)


def test_an_owner_at_its_cap_over_all_environments_blocks_nobody():
    store = Store(Rules(capacity=2), max_tasks={"a": 1})
    store.ask("a", "t0")
    answer = refused(store.ask("a", "t1"))
    assert answer.reason == "owner_tasks"
    assert answer.ticket is not None
    store.now_s += 0.1
    assert isinstance(store.ask("b", "t0"), Admit)


def test_without_the_rooms_of_owners_a_start_over_the_overall_cap_gets_no_ticket():
    asks = replace(Store(Rules(capacity=2)).snapshot("a"), owner_max_tasks=1, owner_holds=1)
    answer = refused(decide(Rules(capacity=2), Wish("a", "k", "train"), asks))
    assert (answer.reason, answer.ticket, answer.drop) == ("owner_tasks", None, ())
    before = replace(asks, tickets=(Ticket("a", "k", "train", 0.0, asks.now_s + 1),))
    assert refused(decide(Rules(capacity=2), Wish("a", "k", "train"), before)).drop == (("a", "k"),)


def test_an_expired_ticket_blocks_nobody_and_is_dropped():
    store = full_store(1)
    dead = refused(store.ask("a", "dead")).ticket
    assert dead is not None
    store.release("flood", "first0")
    store.now_s = dead.expires_s - 0.001
    assert refused(store.ask("b", "k")).reason == "capacity"
    store.now_s = dead.expires_s
    answer = store.ask("b", "k")
    assert isinstance(answer, Admit)
    assert answer.drop == (("a", "dead"), ("b", "k"))
    assert store.tickets == {}


def test_a_full_queue_refuses_without_a_ticket():
    store = full_store(1, max_queue=2)
    store.ask("flood", "a")
    store.ask("flood", "b")
    answer = refused(store.ask("flood", "c"))
    assert (answer.reason, answer.ticket, answer.drop) == ("queue_full", None, ())
    assert refused(store.ask("flood", "b")).ticket is not None
    store.rules = replace(store.rules, max_queue=0)
    assert refused(store.ask("other", "a")).reason == "queue_full"
    assert refused(store.ask("flood", "b")).reason == "capacity", "a place that was given is kept"


def test_an_owner_that_fills_the_queue_gives_a_place_to_another():
    store = full_store(1, max_queue=3)
    for key in ("a", "b", "c"):
        store.now_s += 0.1
        store.ask("flood", key)
    answer = refused(store.ask("modest", "k"))
    assert answer.reason == "capacity"
    assert answer.ticket is not None
    assert answer.drop == (("flood", "c"),)
    # Two for flood, one for modest: taking another one would only turn them round.
    assert refused(store.ask("modest", "k2")).reason == "queue_full"


@pytest.mark.parametrize(
    ("num_released", "place", "expected_s"),
    [(0, 1, 1.0), (0, 50, 5.0), (0, 1000, MAX_RETRY_S), (60, 5, 5.0), (600, 1, 0.5), (6, 1, 10.0), (1, 5, MAX_RETRY_S)],
)
def test_the_wait_for_capacity_is_the_place_over_the_release_rate(num_released: int, place: int, expected_s: float):
    snapshot = Snapshot(
        holding=Holding({"x": (4, 0)}),
        tickets=[Ticket("x", f"{number:05d}", "train", number, 1e6) for number in range(place - 1)],
        next_s=0.0,
        owner_max_tasks=0,
        owner_holds=0,
        num_released_recently=num_released,
        recent_s=60.0,
        now_s=5000.0,
    )
    answer = refused(decide(Rules(capacity=4), Wish("x", "me", "train"), snapshot))
    assert answer.retry_after_s == pytest.approx(expected_s)
    assert answer.ticket is not None
    assert answer.ticket.expires_s - 5000.0 == pytest.approx(max(2 * expected_s, expected_s + 2.0))


def test_an_eval_start_behind_many_train_starts_waits_for_the_reserve_only():
    tickets = [Ticket("x", f"{number:05d}", "train", number, 1e6) for number in range(1000)]
    snapshot = replace(full_store(1).snapshot("x"), now_s=5000.0, tickets=tickets, num_released_recently=60)
    held = replace(snapshot, holding=Holding({"x": (2, 2)}))
    answer = refused(decide(Rules(capacity=4, eval_reserved=2), Wish("x", "me", "eval"), held))
    assert answer.retry_after_s == pytest.approx(2.0)


def test_the_rate_admits_the_burst_and_then_says_exactly_when():
    store = Store(Rules(capacity=100, start_rate=2.0, start_burst=3))
    answers = [store.ask("a", f"k{number}") for number in range(6)]
    assert [type(answer) for answer in answers] == [Admit] * 3 + [Refuse] * 3
    waits = [refused(answer).retry_after_s for answer in answers[3:]]
    assert waits == pytest.approx([0.5, 1.0, 1.5], abs=1e-5)
    assert {refused(answer).reason for answer in answers[3:]} == {"rate"}
    began_s = store.now_s
    for number, wait_s in enumerate(waits, start=3):
        store.now_s = began_s + wait_s
        assert isinstance(store.ask("a", f"k{number}"), Admit)


def test_a_raised_rate_and_a_clock_set_back_hold_for_one_interval_at_most():
    store = Store(Rules(capacity=9, start_rate=0.001))
    store.ask("a", "k0")
    store.rules = replace(store.rules, start_rate=10.0)
    store.now_s -= 3600.0
    assert refused(store.ask("a", "k1")).retry_after_s == pytest.approx(0.1, abs=1e-5)


def test_eval_tasks_on_the_reserve_do_not_use_up_the_rate():
    store = Store(Rules(capacity=8, eval_reserved=4, start_rate=1.0))
    store.ask("a", "e0", "eval")
    store.ask("a", "t0")
    store.now_s += 0.1
    store.ask("a", "e1", "eval")
    store.now_s += 0.9
    assert refused(store.ask("a", "e1", "eval")).reason == "rate"
    assert isinstance(store.ask("a", "t0"), Admit)


def test_ten_thousand_tickets_of_one_owner_do_not_starve_another_and_are_decided_fast():
    # All at one moment is the worst case for the order, and shuffled the worst for its sort.
    keys = [f"{number * 7919 % 10_000:05d}" for number in range(10_000)]
    tickets = [Ticket("flood", key, "train", float(key), 1e9) for key in keys]
    base = replace(Store(Rules(capacity=1)).snapshot("modest"), holding=Holding({"flood": (63, 0)}), now_s=2e4)
    snapshot = replace(base, tickets=tickets)
    began_s = time.process_time()
    for _ in range(10):
        assert isinstance(decide(Rules(capacity=64), Wish("modest", "only", "train"), snapshot), Admit)
    assert (time.process_time() - began_s) / 10 < 0.1
    assert isinstance(decide(Rules(capacity=64), Wish("flood", keys[0], "train"), snapshot), Admit)
    assert refused(decide(Rules(capacity=64), Wish("flood", "new", "train"), snapshot)).reason == "queue_full"


def test_startable_is_what_the_owner_would_get():
    store = Store(Rules(capacity=10, eval_reserved=2, owner_capacity=6), max_tasks={"c": 1})
    for number in range(3):
        store.ask("a", f"t{number}")
    assert startable(store.rules, "a", "train", store.snapshot("a")) == 3
    assert startable(store.rules, "b", "train", store.snapshot("b")) == 5
    assert startable(store.rules, "b", "eval", store.snapshot("b")) == 6
    assert startable(store.rules, "c", "eval", store.snapshot("c")) == 1
    store.tickets["b", "waits"] = Ticket("b", "waits", "train", 0.0, store.now_s + 1)
    assert startable(store.rules, "d", "train", store.snapshot("d")) == 4
    assert startable(replace(store.rules, capacity=1), "d", "eval", store.snapshot("d")) == 0
