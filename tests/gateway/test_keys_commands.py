"""Keys, TLS and private files as an operator meets them: the command line and a real gateway process."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from certificates import make_certificate

from tide_gateway.cli import main
from tide_gateway.settings import SettingsError, check_tls
from tide_sdk.client import GatewayClient

GO = {"role": "assistant", "content": "go"}


def run(*words: str, database: Path) -> int:
    return main([*words, "--database", f"sqlite:///{database}"])


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_key_is_printed_once_and_nothing_else_on_stdout(tmp_path, capsys):
    database = tmp_path / "gateway.db"
    words = ["keys", "create", "--owner", "ann", "--role", "author", "--label", "laptop", "--expires-days", "2"]
    assert run(*words, database=database) == 0
    out, err = capsys.readouterr()
    assert out.startswith("tide_")
    assert len(out.strip().splitlines()) == 1
    _, key_id, secret = out.strip().split("_", 2)
    assert secret not in err
    assert run("keys", "list", database=database) == 0
    table = capsys.readouterr().out
    assert secret not in table
    assert [key_id, "ann", "author", "valid"] == table.splitlines()[1].split()[:4]
    assert run("keys", "revoke", key_id, database=database) == 0
    assert run("keys", "list", database=database) == 0
    assert "revoked" in capsys.readouterr().out.splitlines()[-1]
    assert run("owners", "set", "ann", "--max-tasks", "7", database=database) == 0
    assert run("owners", "list", database=database) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["ann", "7"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["keys", "create", "--owner", "a b"], "owner: "),
        (["keys", "create", "--owner", "ann", "--expires-days", "-1"], "lifetime: "),
        (["keys", "create", "--owner", "ann", "--label", "a\nb"], "label: "),
        (["keys", "revoke", "00000000"], "no such key"),
        (["keys", "revoke", "tide_00000000_" + "S" * 43], "no such key"),
        (["owners", "set", "ann", "--max-tasks", "-1"], "max_tasks: "),
    ],
)
def test_a_wrong_command_is_exit_code_2_and_one_line(tmp_path, capsys, words, told):
    assert run(*words, database=tmp_path / "gateway.db") == 2
    out, err = capsys.readouterr()
    assert (out, len(err.strip().splitlines())) == ("", 1)
    assert told in err
    assert "SSS" not in err


def test_a_database_that_cannot_be_written_is_named(tmp_path, capsys):
    assert run("keys", "list", database=tmp_path / "no" / "gateway.db") == 2
    assert "cannot write" in capsys.readouterr().err


def test_files_and_folders_are_private(gateways):
    gateway = gateways()
    with gateway.client() as client:
        task_id = client.post("/start", json={"environment": "scripted", "key": "k"}).json()["task_id"]
        body = {"task_id": task_id, "turn": 0, "message": GO | {"content": "x" * 20_000}}
        assert client.post("/observation", json=body).status_code == 200
    kinds = {"gateway.db": 0o600, "gateway.db-wal": 0o600, "gateway.db-shm": 0o600, "gateway.db.lock": 0o600,
             "gateway.db-data": 0o700, "gateway.db-data/logs": 0o700, "gateway.db-data/blobs": 0o700}  # fmt: skip
    found = {name: stat.S_IMODE((gateway.folder / name).stat().st_mode) for name in kinds}
    assert found == kinds


def test_a_key_made_and_revoked_beside_a_running_gateway_works_within_seconds(gateways, capsys):
    gateway = gateways()
    database = gateway.folder / "gateway.db"
    with gateway.client() as nobody:
        task_id = nobody.post("/start", json={"environment": "scripted", "key": "k"}).json()["task_id"]
        assert run("keys", "create", "--owner", "ann", database=database) == 0
        text = capsys.readouterr().out.strip()
        until(lambda: nobody.get("/tasks").status_code == 401)
        with gateway.client(text) as ann:
            assert ann.get("/tasks").json()["tasks"] == []
            assert ann.post("/end", json={"task_id": task_id}).status_code == 404
            assert run("keys", "revoke", text.split("_")[1], database=database) == 0
            until(lambda: ann.get("/tasks").status_code == 401)
        assert nobody.get("/tasks").status_code == 401
    assert text.split("_", 2)[2] not in gateway.log()


def test_g27_a_public_address_is_served_with_keys_only(tmp_path, capsys):
    config = tmp_path / "environments.toml"
    config.write_text('[environments.scripted]\nruntime = "fake"\n')
    announce = tmp_path / "announce.json"
    argv = [sys.executable, "-m", "tide_gateway", "serve", "--config", str(config), "--port", "0", "--host", "0.0.0.0"]
    argv += ["--database", f"sqlite:///{tmp_path / 'gateway.db'}", "--announce", str(announce)]
    refused = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "tide-gateway keys create" in refused.stderr
    assert run("keys", "create", "--owner", "ann", database=tmp_path / "gateway.db") == 0
    text = capsys.readouterr().out.strip()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(argv, stderr=log)
    try:
        until(lambda: announce.exists() or process.poll() is not None, 30)
        url = json.loads(announce.read_text())["url"].replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/tasks").status_code == 401
        assert httpx.get(f"{url}/tasks", headers={"Authorization": f"Bearer {text}"}).status_code == 200
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder)
    return folder


def test_tls_files_are_checked_before_anything_starts(certificate, tmp_path):
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    check_tls(None, None)
    check_tls(cert, key)
    (tmp_path / "junk.pem").write_text("junk")
    for one, two, words in (
        (cert, None, "belong together"),
        (None, key, "belong together"),
        (tmp_path / "none.pem", key, "--tls-cert"),
        (cert, tmp_path / "none.pem", "--tls-key"),
        (cert, tmp_path, "--tls-key"),
        (cert, certificate / "other.pem", "is not the key of"),
        (cert, certificate / "locked.pem", "encrypted"),
        (tmp_path / "junk.pem", key, "in PEM"),
    ):
        with pytest.raises(SettingsError, match=words):
            check_tls(one, two)


def test_a_whole_task_over_tls(certificate, tmp_path, monkeypatch):
    config = tmp_path / "environments.toml"
    config.write_text('[environments.scripted]\nruntime = "fake"\n')
    announce = tmp_path / "announce.json"
    argv = [sys.executable, "-m", "tide_gateway", "serve", "--config", str(config), "--port", "0"]
    argv += ["--database", f"sqlite:///{tmp_path / 'gateway.db'}", "--announce", str(announce)]
    argv += ["--tls-cert", str(certificate / "cert.pem"), "--tls-key", str(certificate / "key.pem")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(argv, stderr=log)
    try:
        until(lambda: announce.exists() or process.poll() is not None, 30)
        url = json.loads(announce.read_text())["url"]
        assert url.startswith("https://")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))

        async def play() -> int:
            async with GatewayClient(url) as client:
                started = await client.start("scripted", "k")
                await client.observe(started.task_id, 0, GO)
                return (await client.end(started.task_id)).turns

        assert asyncio.run(play()) == 1
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http"))
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
    finally:
        process.kill()
        process.wait()
