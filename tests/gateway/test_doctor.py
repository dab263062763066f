"""The doctor sees what is wrong, names the fix, tells no secret, and changes nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from sqlalchemy import create_engine, text

from tide_gateway.cli import main
from tide_gateway.doctor import host, storage
from tide_gateway.doctor.findings import Check, Level, ok, run_checks
from tide_gateway.specs import EnvironmentSpec

INSTANCE = (
    "INSERT INTO instances (name, environment, runtime, replica, state, version, slot, capacity, served, incarnation,"
    " place, created_s, detail) VALUES ('{}', '{}', 'process', 'r', '{}', 1, 0, 1, 0, '', '', 0.0, 'it hung')"
)


def execute(url: str, *statements: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """What is there; of SQLite's shared memory, which readers renew, only that it is."""
    found = {str(path): path.stat() for path in sorted(folder.rglob("*"))}
    return {name: (0 if name.endswith("-shm") else s.st_mtime_ns, s.st_mode) for name, s in found.items()}


def test_before_the_first_start_all_is_well_and_nothing_is_made(doctor, tmp_path, capsys):
    before = listing(tmp_path)
    code, found = doctor.look()
    assert code == 0
    assert {level for each in found.values() for level in (f["level"] for f in each)} == {"ok", "warn"}
    assert found["database"][0]["fix"] == "`serve` or `migrate` makes it"
    assert listing(tmp_path) == before
    assert main(["doctor", "--config", str(doctor.config), "--database", doctor.database]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("warn  database ") for line in lines)
    assert last.endswith("1 warn, 0 fail")


def test_a_gateway_that_runs_is_found_and_one_that_died_leaves_its_traces(gateways, doctor, tmp_path):
    gateway = gateways()
    doctor.port = int(gateway.url.rpartition(":")[2])
    with gateway.client() as client:
        start = {"environment": "scripted", "key": "k", "task": {}}
        assert client.post("/start", json=start).status_code == 201
    code, found = doctor.look()
    assert code == 0, doctor.text
    assert f"pid {gateway.process.pid}" in found["lock"][0]["says"]
    assert found["replicas"][0]["says"] == "1 running"
    assert found["tasks"][0]["says"] == "open: 1 waiting"
    assert found["servers"][-1]["says"] == "1 ready"
    assert "a gateway answers" in found["address"][0]["says"]
    assert found["orphans"][0]["level"] == "ok"
    doctor.one("address", "warn", f"but a gateway (pid {gateway.process.pid}) uses the database", "--port", "1")
    # A start with that other database would be refused the port.
    doctor.one("address", "fail", "of another database", database=f"sqlite:///{tmp_path / 'other.db'}")

    gateway.process.kill()
    gateway.process.wait()
    before = listing(tmp_path)
    code, found = doctor.look()
    assert code == 0
    assert listing(tmp_path) == before
    assert "left by a gateway that is gone" in found["lock"][0]["says"]
    assert found["replicas"][0]["level"] == "warn"
    assert "start a gateway" in found["replicas"][0]["fix"]
    assert found["orphans"][0]["level"] == "ok"
    execute(doctor.database, "DELETE FROM instances")
    doctor.one("orphans", "warn", "1 processes that no row names")


def test_rows_that_want_attention_are_named(fresh_databases, doctor):
    with fresh_databases.fresh("sqlite") as url:
        execute(
            url,
            INSTANCE.format("i0", "scripted", "condemned"),
            INSTANCE.format("i1", "scripted", "gone"),
            INSTANCE.format("i2", "other", "ready"),
            "INSERT INTO replicas (name, host, pid, ticks, started_s, seen_s) VALUES ('r', 'h', 1, 2, 3.0, 4.0)",
        )
        code, found = doctor.look(database=url)
        assert code == 0
        says = " | ".join(each["says"] for each in found["servers"])
        assert "i0 is condemned: it hung" in says
        assert "i1 is being removed" in says
        assert "the configuration does not have: other" in says
        assert "replica r (pid 1) is dead" in found["replicas"][0]["says"]


@pytest.mark.parametrize(
    ("revision", "level", "words"),
    [("gateway_9999", "fail", "a newer one migrated it"), ("gateway_0001", "warn", "`serve` or `migrate` brings it")],
)
def test_another_revision_is_told_and_its_tables_are_not_read(fresh_databases, doctor, revision, level, words):
    with fresh_databases.fresh("sqlite") as url:
        execute(url, f"UPDATE gateway_alembic_version SET version_num = '{revision}'")
        doctor.one("database", level, words, database=url)
        assert "replicas" not in doctor.look(database=url)[1]
        doctor.one("keys", "warn", "not known", database=url)


def test_tables_in_the_way_of_the_gateways_own_fail(doctor):
    execute(doctor.database, "CREATE TABLE tasks (x INTEGER)")
    doctor.one("database", "fail", "in the way of its own: tasks")


def test_the_words_of_serve_are_taken(doctor):
    words = ["--keep", "--drain-s", "30", "--outlive-s", "60", "--retention-days", "1", "--log-format", "json"]
    assert doctor.look(*words, "--log-level", "debug", "--announce", str(doctor.folder / "announce.json"))[0] == 0
    assert not (doctor.folder / "announce.json").exists()


@pytest.mark.postgres
def test_postgres_is_read_and_its_password_is_not_told(fresh_databases, doctor, monkeypatch):
    with fresh_databases.fresh("postgres") as url:
        code, found = doctor.look("--data", str(doctor.folder / "data"), database=url)
        assert code == 0, doctor.text
        assert "at revision" in found["database"][0]["says"]
        assert found["clock"][0]["level"] == found["connections"][0]["level"] == "ok"
        assert any(each["says"].startswith("postgresql: psycopg") for each in found["extras"])
        with_password = url.replace("tide@", "tide:hush-hush@")
        doctor.look("--data", str(doctor.folder / "data"), database=with_password)
        assert "hush" not in doctor.text
        monkeypatch.setattr("tide_gateway.doctor.database.MAX_SKEW_S", -1e9)
        monkeypatch.setattr("tide_gateway.doctor.database.CONNECTIONS", 10**9)
        _, found = doctor.look(database=url)
        assert found["clock"][0]["level"] == found["connections"][0]["level"] == "warn"
    doctor.one("database", "fail", "the server is up", database="postgresql://tide:hush@127.0.0.1:1/tide")
    assert "hush" not in doctor.text


@pytest.mark.parametrize(
    ("options", "check", "words"),
    [
        (["--config", "/no/such.toml"], "configuration", "name the file with --config"),
        (["--database", "mysql://x:hush@y/z"], "database", "not supported"),
        (["--database", "sqlite:////no/such/folder/x.db"], "database file", "no such folder"),
        (["--data", "/no/such/folder"], "data folder", "no such folder"),
        (["--host", "0.0.0.0"], "keys", "keys create"),
        (["--host", "203.0.113.7"], "address", "cannot listen"),
        (["--host", "no.such.host.invalid"], "address", "name an address of this machine"),
        (["--tls-cert", "/no/such.pem"], "tls", "give both or none"),
        (["--drain-s", "nan"], "options", "must be 0 to 3600 seconds"),
        (["--announce", "/tmp"], "options", "name a file in it"),
    ],
)
def test_what_a_start_would_be_refused_for_fails(doctor, options, check, words):
    doctor.one(check, "fail", words, *options)
    assert "hush" not in doctor.text
    assert len(doctor.look(*options)[1]) >= 7, "one that fails stops no other"


def test_a_port_that_something_else_holds_fails(doctor):
    with socket.create_server(("127.0.0.1", doctor.port)) as listener:
        listener.settimeout(0)
        host.ANSWER_S, before = 0.3, host.ANSWER_S
        try:
            doctor.one("address", "fail", "does not answer as a gateway does")
        finally:
            host.ANSWER_S = before


def test_files_that_others_can_read_are_told(fresh_databases, doctor, tmp_path):
    with fresh_databases.fresh("sqlite") as url:
        path = Path(url.removeprefix("sqlite:///"))
        path.chmod(0o644)
        doctor.one("database file", "warn", f"chmod 600 {path}", database=url)
        path.chmod(0o600)
        data = tmp_path / "data"
        data.mkdir(0o755)
        doctor.one("data folder", "warn", f"chmod 700 {data}", "--data", str(data), database=url)


def test_a_full_disk_and_too_few_descriptors_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "MIN_FREE_BYTES", 2**62)
    assert [finding.level for finding in storage.look_at_files(None, tmp_path)][-1] is Level.FAIL
    specs = [EnvironmentSpec(name=f"e{n}", command=("x", "{uds}"), capacity=100_000) for n in range(2)]
    (finding,) = host.look_at_file_limit(specs)
    assert (finding.level, "LimitNOFILE" in finding.fix) == (Level.FAIL, True)


def test_secrets_are_in_no_output(doctor, monkeypatch):
    token = "0123456789abcdef-hush"
    monkeypatch.setenv("TIDE_GATEWAY_TOKENS", f"ann:{token}")
    code, found = doctor.look("--host", "0.0.0.0")
    assert (code, found["keys"][0]["level"]) == (0, "ok")
    assert "1 static tokens" in found["configuration"][0]["says"]
    assert "hush" not in doctor.text
    monkeypatch.setenv("TIDE_GATEWAY_TOKENS", f"ann:{token},bob:{token}")
    doctor.one("configuration", "fail", "repeats an earlier token")
    assert "hush" not in doctor.text


def certificate(folder: Path, days: float, since: float = 30.0) -> list[str]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(7)
        .not_valid_before(now - timedelta(days=since)).not_valid_after(now + timedelta(days=days))
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    cert, secret = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption()))
    return ["--tls-cert", str(cert), "--tls-key", str(secret)]


@pytest.mark.parametrize(
    ("days", "level", "words"),
    [(90, "ok", "is valid until"), (13, "warn", "expires on"), (-1, "fail", "expired")],
)
def test_a_certificate_is_looked_at_before_it_expires(doctor, tmp_path, days, level, words):
    doctor.one("tls", level, words, *certificate(tmp_path, days))


async def test_a_check_that_breaks_or_hangs_stops_no_other():
    async def breaks():
        raise ZeroDivisionError("tide_01234567_" + "S" * 43)

    async def hangs():
        await asyncio.sleep(3600)

    async def works():
        return [ok("works", "well\n\x1b[31m")]

    checks = [Check("breaks", breaks), Check("hangs", hangs, limit_s=0.05), Check("works", works)]
    found = await run_checks(checks)
    assert [(each.check, each.level) for each in found] == [
        ("breaks", Level.FAIL), ("hangs", Level.FAIL), ("works", Level.OK),
    ]  # fmt: skip
    assert "SSS" not in found[0].says
    assert found[2].says == "well [31m"


def test_a_lock_is_seen_without_taking_it(tmp_path):
    from tide_gateway.database import FileLock

    lock = FileLock(tmp_path / "x.lock")
    lock.take()
    assert storage.holder_of(tmp_path / "x.lock") == os.getpid()
    lock.free()
    assert storage.holder_of(tmp_path / "x.lock") == 0
