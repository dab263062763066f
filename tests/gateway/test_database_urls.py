"""URLs of databases: what is taken, and what is said of those that are not."""

from __future__ import annotations

import sys

import pytest

from tide_gateway.database import DatabaseError, database_url, sqlite_url

SECRET = "hunter2"


@pytest.mark.parametrize(
    "word",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "mysql://x/y",
        "x",
        "sqlite:///a.db?mode=ro",
        "sqlite:///a.db?synchronous=off",
        "sqlite:///a.db?synchronous=full&mode=ro",
        "sqlite:///a.db?synchronous=full&synchronous=normal",
    ],
)
def test_urls_that_are_not_a_database_are_refused_with_an_example(word):
    with pytest.raises(DatabaseError, match="sqlite:///path"):
        database_url(word)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (f"postgresql+asyncpg://u:{SECRET}@h/d", "the driver is psycopg"),
        (f"postgresql://u:{SECRET}@h", "name the database"),
        (f"postgresql://u:{SECRET}@h/d?tablespace=x", "tablespace"),
        (f"postgresql://u:{SECRET}@h:port/d", "not a URL"),
        (f"oracle://u:{SECRET}@h/d", "oracle is not supported"),
    ],
)
def test_what_is_wrong_with_a_url_is_told_without_its_password(url, told):
    pytest.importorskip("psycopg")
    with pytest.raises(DatabaseError, match=told) as caught:
        database_url(url)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None or SECRET not in str(caught.value.__cause__)


def test_a_missing_driver_is_told_with_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(DatabaseError, match=r"tiderl\[postgres\]"):
        database_url("postgresql://u@h/d")


def test_the_spellings_of_a_driver_are_one_database():
    assert sqlite_url("sqlite+aiosqlite:///a.db") == sqlite_url("sqlite:///a.db")
    pytest.importorskip("psycopg")
    spellings = ("postgres://u@h/d", "postgresql://u@h/d", "postgresql+psycopg://u@h/d")
    assert len({database_url(spelling) for spelling in spellings}) == 1
    with pytest.raises(DatabaseError, match="must be a file"):
        sqlite_url(spellings[0])
