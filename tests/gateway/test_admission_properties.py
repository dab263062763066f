"""Properties of who may start now: in any order of starts, releases and pauses of a model store."""

from __future__ import annotations

from collections import Counter
from random import Random

from admission_store import Store, full_store
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_gateway.admission import Admit, Kind, Refuse, Rules, Wish, decide, waiting

OWNERS = ("a", "b", "c")
KINDS: tuple[Kind, ...] = ("train", "eval")
rule_sets = st.integers(1, 8).flatmap(
    lambda capacity: st.builds(
        Rules,
        capacity=st.just(capacity),
        owner_capacity=st.integers(0, 4),
        eval_reserved=st.integers(0, capacity - 1),
        start_rate=st.sampled_from([0.0, 0.5, 3.0]),
        start_burst=st.integers(1, 3),
        max_queue=st.integers(0, 12),
    )
)
steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "release", "pass"]),
        st.sampled_from(OWNERS),
        st.integers(0, 11),
        st.floats(0.0, 4.0, allow_nan=False),
    ),
    max_size=60,
)


@given(rule_sets, steps, st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_in_any_sequence_the_limits_hold_and_a_refusal_changes_only_tickets(rules, sequence, max_tasks):
    store = Store(rules, max_tasks={"a": max_tasks} if max_tasks else {})
    starts: list[float] = []
    for what, owner, number, seconds in sequence:
        key, kind = f"k{number}", KINDS[number % 2]
        if what == "pass":
            store.now_s += seconds
        elif what == "release":
            if (owner, key) in store.held:
                store.release(owner, key)
        elif (owner, key) not in store.held:
            snapshot = store.snapshot(owner)
            held, next_s = dict(store.held), store.next_s
            answer = store.ask(owner, key, kind)
            assert answer == decide(rules, Wish(owner, key, kind), snapshot)
            if isinstance(answer, Admit):
                starts.append(store.now_s)
                assert (owner, key) not in store.tickets
            else:
                assert (store.held, store.next_s) == (held, next_s)
                assert answer.retry_after_s > 0
            _check_limits(store)
    _check_rate(rules, starts)


def _check_limits(store: Store) -> None:
    rules, kinds = store.rules, Counter(store.held.values())
    owners = Counter(owner for owner, _ in store.held)
    assert len(store.held) <= rules.capacity
    assert kinds["train"] <= rules.capacity - rules.eval_reserved
    assert not rules.owner_capacity or max(owners.values(), default=0) <= rules.owner_capacity
    assert all(owners[owner] <= limit for owner, limit in store.max_tasks.items())
    assert len(waiting(store.snapshot("a"))) <= rules.max_queue
    assert all(ticket.expires_s > store.now_s for ticket in store.tickets.values())


def _check_rate(rules: Rules, starts: list[float]) -> None:
    if rules.start_rate:
        for first, from_s in enumerate(starts):
            for last in range(first, len(starts)):
                allowed = rules.start_burst + rules.start_rate * (starts[last] - from_s)
                assert last - first + 1 <= allowed + 1e-3


@given(st.integers(1, 6), st.integers(1, 6), st.lists(st.sampled_from(OWNERS), max_size=20))
@settings(max_examples=60, deadline=None)
def test_the_reserve_is_always_reachable_for_eval(num_reserved, num_shared, owners):
    store = Store(Rules(capacity=num_reserved + num_shared, eval_reserved=num_reserved))
    for number, owner in enumerate(owners):
        store.ask(owner, f"t{number}")
    assert all(isinstance(store.ask("z", f"e{number}", "eval"), Admit) for number in range(num_reserved))


@given(st.integers(1, 5), st.integers(1, 30), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_an_owner_that_calls_again_when_told_starts_after_few_releases(capacity, num_flood, seed):
    random, store = Random(seed), full_store(capacity)
    calls = {("flood", f"w{number:02d}"): store.now_s for number in range(num_flood)}
    for name in calls:
        store.ask(*name)
    calls["modest", "only"] = store.now_s
    told_s, late = store.now_s, set[str]()
    for _ in range(5000):
        if ("modest", "only") in store.held:
            break
        name = min(calls, key=lambda name: (calls[name], name))
        store.now_s = calls.pop(name)
        if store.held and random.random() < 0.5:
            store.release(*random.choice(sorted(store.held)))
        answer = store.ask(*name)
        if isinstance(answer, Refuse):
            calls[name] = store.now_s + answer.retry_after_s
            told_s = calls[name] if name[0] == "modest" else told_s
        else:
            late |= {name[1]} if ("modest", "only") in store.tickets else set()
            calls["flood", f"n{len(store.released):04d}"] = store.now_s
        assert store.now_s <= told_s
    assert ("modest", "only") in store.held
    # However the flood calls: it starts at most once for each slot before the other owner does.
    assert len(late) <= capacity


@given(st.integers(1, 4), st.integers(2, 5))
@settings(max_examples=30, deadline=None)
def test_owners_take_turns_where_there_are_more_of_them_than_slots(capacity, num_modest):
    store = full_store(capacity)
    for number in range(50):
        store.now_s += 0.001
        store.ask("flood", f"w{number:02d}")
    for number in range(num_modest):
        store.now_s += 0.001
        store.ask(f"m{number}", "only")
    starts: list[str] = []
    while len({owner for owner in starts if owner != "flood"}) < num_modest:
        store.now_s += 0.01
        store.release(*min(store.held))
        for name in sorted(waiting(store.snapshot("m0")), key=lambda ticket: ticket.key):
            if isinstance(store.ask(name.owner, name.key), Admit):
                starts.append(name.owner)
    # `min` gives back the flood's slots first, so that it holds nothing again and again.
    assert starts.count("flood") <= num_modest


@given(st.integers(2, 5), st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_a_flooding_and_a_modest_owner_come_to_hold_the_same(capacity, seed):
    random, store = Random(seed), Store(Rules(capacity=2 * capacity))
    for number in range(2 * capacity):
        store.ask("flood", f"f{number}")
    for number in range(30):
        store.ask("flood", f"g{number:03d}")
    for number in range(2 * capacity):
        store.ask("modest", f"m{number:03d}")
    while any(key.startswith("f") for owner, key in store.held):
        oldest = min(key for owner, key in store.held if key.startswith("f"))
        store.release("flood", oldest)
        order = sorted((ticket.owner, ticket.key) for ticket in waiting(store.snapshot("flood")))
        random.shuffle(order)
        for name in order:
            store.ask(*name)
    owners = Counter(owner for owner, _ in store.held)
    assert owners["flood"] == owners["modest"] == capacity
