"""API keys at rest and in memory: digests only, revocation within seconds, no SQL for wrong ones, never open again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from sqlalchemy import delete
from sqlalchemy import text as text_of

from tide_gateway import auth
from tide_gateway import keys as keys_module
from tide_gateway.auth import Owners
from tide_gateway.database import Database, StorageFailed, open_database
from tide_gateway.keys import KeyRefused, KeyStore
from tide_gateway.models import KeyRow
from tide_gateway.roles import LOCAL, Caller
from tide_sdk.errors import TideError


@dataclass
class Clock:
    now_s: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class CountedStore(KeyStore):
    """Counts how often the table is read; `broken` stands for a database that does not answer."""

    database: Database
    clock: Clock
    reads: int = 0
    loaded: int = 0
    broken: bool = False
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        super().__init__(self.database, self.clock)
        self.gate.set()

    async def table(self):
        self.reads += 1
        table = await super().table()
        self.loaded += 1
        await self.gate.wait()
        if self.broken:
            raise StorageFailed("gone")
        return table


@pytest.fixture
async def store(database_url) -> AsyncIterator[CountedStore]:
    database = open_database(database_url)
    yield CountedStore(database, Clock())
    await database.close()


def bearer(text: str) -> bytes:
    return b"Bearer " + text.encode()


async def refused(owners: Owners, header: bytes | None) -> str:
    with pytest.raises(TideError) as caught:
        await owners.caller(header)
    return caught.value.code


async def test_g28_only_a_digest_is_at_rest(store):
    text, key = await store.create("ann", "author", label="laptop")
    prefix, key_id, secret = text.split("_", 2)
    assert (prefix, key_id, len(secret)) == ("tide", key.key_id, 43)
    (row,) = await store.database.read(lambda c: c.execute(text_of("SELECT * FROM api_keys")).mappings().all())
    assert len(row["digest"]) == 64
    assert all(secret not in str(value) for value in row.values())


async def test_a_key_says_who_calls_until_it_expires_or_is_revoked(store, monkeypatch):
    monkeypatch.setattr(auth, "FRESH_S", 0.0)
    monkeypatch.setattr(auth, "EAGER_S", 0.0)
    owners = Owners({}, store)
    text, _ = await store.create("ann", "author", lifetime_s=60.0)
    other, _ = await store.create("bob", "agent")
    assert await owners.caller(bearer(text)) == Caller("ann", "author")
    assert await owners.caller(bearer(other)) == Caller("bob", "agent")
    store.clock.now_s += 61
    assert await refused(owners, bearer(text)) == "unauthorized"
    assert await owners.caller(bearer(other)) == Caller("bob", "agent")
    (_, bobs) = sorted(await store.keys(), key=lambda key: key.owner)
    assert (await store.revoke(bobs.key_id)).revoked_s == store.clock.now_s
    assert await refused(owners, bearer(other)) == "unauthorized"
    store.clock.now_s += 5
    assert (await store.revoke(bobs.key_id)).revoked_s == store.clock.now_s - 5
    assert await store.revoke("ffffffff") is None


async def test_every_wrong_key_is_refused(store):
    text, key = await store.create("ann", "agent")
    other, _ = await store.create("bob", "agent")
    owners = Owners({}, store)
    secret, others = text.split("_", 2)[2], other.split("_", 2)[2]
    wrong = ["", "tide", f"tide_{key.key_id}_", f"tide_{key.key_id}_{others}", f"tide_00000000_{secret}", secret]
    wrong += [
        text[:-1],
        text + "x",
        text + "\u00e9",
        text.upper(),
        f"tide_{key.key_id}_{'=' * 43}",
        text.replace("_", "-"),
    ]
    for guess in wrong:
        assert await refused(owners, bearer(guess)) == "unauthorized", guess
    assert await owners.caller(bearer(text)) == Caller("ann", "agent")


async def test_calls_and_wrong_keys_cost_no_query_each(store):
    text, _ = await store.create("ann", "agent")
    owners = Owners({}, store)
    for _ in range(500):
        assert (await owners.caller(bearer(text))).owner == "ann"
    assert store.reads <= 2  # one; a machine that stood still for seconds reads again
    before = store.reads
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for number in range(2000):
        await refused(owners, bearer(f"tide_{number:08x}_{'A' * 43}"))
    assert store.reads - before <= 1 + (loop.time() - began_s) / auth.EAGER_S


async def test_a_revocation_and_a_new_key_reach_other_replicas(store, monkeypatch, eventually):
    monkeypatch.setattr(auth, "FRESH_S", 0.05)
    monkeypatch.setattr(auth, "EAGER_S", 0.01)
    here, there = Owners({}, store), Owners({}, KeyStore(store.database, store.clock))
    old, key = await store.create("ann", "agent")
    for owners in (here, there):
        assert (await owners.caller(bearer(old))).owner == "ann"
    new, _ = await store.create("bob", "agent")
    await store.revoke(key.key_id)

    async def knows(owners: Owners, text: str) -> bool:
        try:
            return bool(await owners.caller(bearer(text)))
        except TideError:
            return False

    for owners in (here, there):

        async def settled(owners: Owners = owners) -> bool:
            return await knows(owners, new) and not await knows(owners, old)

        await eventually(settled, "the change arrives")


async def test_many_callers_wait_for_one_query_and_one_that_goes_away_does_not_stop_it(store):
    text, _ = await store.create("ann", "agent")
    owners = Owners({}, store)
    store.gate.clear()
    calls = [asyncio.create_task(owners.caller(bearer(text))) for _ in range(50)]
    await asyncio.sleep(0)
    calls[0].cancel()
    store.gate.set()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [Caller("ann", "agent")] * 49
    assert store.reads == 1


async def test_a_change_through_this_process_is_not_hidden_by_a_query_that_began_before_it(store, eventually):
    text, key = await store.create("ann", "agent")
    owners = Owners({}, store)
    store.gate.clear()
    reading = asyncio.create_task(owners.caller(bearer(text)))
    await eventually(lambda: store.loaded == 1, "the old table is on its way")
    owners.forget()
    await store.revoke(key.key_id)
    store.gate.set()
    with pytest.raises(TideError):
        await reading
    assert await refused(owners, bearer(text)) == "unauthorized"


async def test_keys_that_cannot_be_read_are_503_and_nobody_gets_in(store):
    text, _ = await store.create("ann", "agent")
    owners = Owners({"0123456789abcdef": Caller("bob", "operator")}, store)
    store.broken = True
    assert await refused(owners, bearer(text)) == "unavailable"
    assert await refused(Owners({}, store), None) == "unavailable"
    assert (await owners.caller(bearer("0123456789abcdef"))).owner == "bob"
    store.broken = False
    assert (await owners.caller(bearer(text))).owner == "ann"


async def test_what_is_wanted_while_the_database_is_away_goes_by_the_keys_as_last_known(store, monkeypatch):
    monkeypatch.setattr(auth, "FRESH_S", 0.0)
    text, _ = await store.create("olga", "operator")
    owners, open_once, never_read = Owners({}, store), Owners({}, store), Owners({}, store)
    assert await owners.as_last_known(bearer(text)) == Caller("olga", "operator")
    open_once._read_once = True
    store.broken = True
    assert await owners.as_last_known(bearer(text)) == Caller("olga", "operator")
    assert await open_once.as_last_known(None) == LOCAL
    for owner, given in ((owners, bearer("tide_00000000_" + "A" * 43)), (never_read, bearer(text)), (never_read, None)):
        with pytest.raises(TideError) as caught:
            await owner.as_last_known(given)
        assert caught.value.code == "unavailable"
    store.broken = False
    for given in (None, bearer("tide_00000000_" + "A" * 43)):
        with pytest.raises(TideError) as caught:
            await owners.as_last_known(given)
        assert caught.value.code == "unauthorized"


async def test_the_first_key_closes_the_gateway_for_good(store, monkeypatch):
    monkeypatch.setattr(auth, "FRESH_S", 0.0)
    owners = Owners({}, store)
    assert await owners.caller(None) == LOCAL
    assert await owners.anonymous()
    _, key = await store.create("ann", "agent")
    assert await refused(owners, None) == "unauthorized"
    assert not await owners.anonymous()
    await store.revoke(key.key_id)
    assert await refused(Owners({}, store), None) == "unauthorized"
    await store.database.write(lambda connection: connection.execute(delete(KeyRow)))
    assert await refused(owners, bearer("tide_00000000_" + "A" * 43)) == "unauthorized"
    assert await refused(owners, None) == "unauthorized"
    assert await refused(Owners({}, store, allow_anonymous=False), None) == "unauthorized"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"owner": ""}, "owner"),
        ({"owner": "a/b"}, "owner"),
        ({"owner": "x" * 65}, "owner"),
        ({"role": "root"}, "role"),
        ({"label": "a\nb"}, "label"),
        ({"label": "x" * 129}, "label"),
        ({"lifetime_s": 0.0}, "lifetime"),
        ({"lifetime_s": float("nan")}, "lifetime"),
        ({"lifetime_s": 1e12}, "lifetime"),
    ],
)
async def test_a_wrong_key_request_names_the_field(store, change, word):
    values = {"owner": "ann", "role": "agent"} | change
    with pytest.raises(KeyRefused, match=f"^{word}: "):
        await store.create(values.pop("owner"), values.pop("role"), **values)
    assert await store.keys() == []


async def test_there_are_only_so_many_valid_keys(store, monkeypatch):
    monkeypatch.setattr(keys_module, "MAX_KEYS", 2)
    (_, first), _ = [await store.create("ann", "agent") for _ in range(2)]
    with pytest.raises(KeyRefused, match="revoke some"):
        await store.create("ann", "agent")
    await store.revoke(first.key_id)
    await store.create("ann", "agent")


async def test_owners_have_limits(store):
    assert await store.owners() == []
    await store.set_owner("bob", 5)
    await asyncio.gather(*(store.set_owner("ann", number) for number in range(1, 9)))
    limits = {limit.owner: limit.max_tasks for limit in await store.owners()}
    assert limits["bob"] == 5
    assert limits["ann"] in range(1, 9)
    for owner, number in (("a b", 1), ("ann", -1), ("ann", 2**31)):
        with pytest.raises(KeyRefused):
            await store.set_owner(owner, number)


def test_roles_are_ordered():
    agent, author, operator = (Caller("ann", role) for role in ("agent", "author", "operator"))
    assert [caller.may("author") for caller in (agent, author, operator)] == [False, True, True]
    with pytest.raises(TideError) as caught:
        author.require("operator")
    assert (caught.value.status, caught.value.extra) == (403, {"role": "operator"})
