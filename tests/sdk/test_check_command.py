"""`tide-env check` as a command: what it starts, kills and leaves, what it prints and writes, and how it exits."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import small_environment
from small_environment import SmallServer

from tide_sdk import cli
from tide_sdk.check.case import Plan
from tide_sdk.check.run import ALL, run_checks, select
from tide_sdk.check.subject import Reached, Unreachable
from tide_sdk.environment import Environment, Start, Step
from tide_sdk.server import EnvironmentServer

ROOT = Path(__file__).resolve().parents[2]
SMALL = [sys.executable, small_environment.__file__, "--uds", "{uds}"]
DRIVE = ["--action", "hello", "--action", "image", "--action", "large", "--end-action", "bye", "--slow-action", "slow"]


def test_a_server_of_another_kind_passes_every_check_and_none_is_skipped(tmp_path):
    files = ["--json", str(tmp_path / "out.json"), "--junit", str(tmp_path / "out.xml")]
    command = [sys.executable, "-m", "tide_sdk.cli", "check", *DRIVE, *files, "--strict", "--", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("small at unix:/")
    assert lines[-1].startswith(f"{len(ALL)} passed, 0 failed, 0 skipped in ")
    assert "\x1b" not in done.stdout, "no colours where nobody looks"
    told = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert [entry["id"] for entry in told] == [case.name for case in ALL]
    assert {entry["result"] for entry in told} == {"pass"}
    suite = ET.parse(tmp_path / "out.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == (str(len(ALL)), "0", "0")


class Talkative(Environment):
    """Says back what it hears, sleeps when asked to, and ends on `bye`."""

    async def start(self, task):
        return Start("Say something.")

    async def step(self, message):
        if message.text == "slow":
            await asyncio.sleep(1.0)
        content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
        if message.text == "large":
            content = "large" * 100_000
        elif message.text != "image":
            content = message.text[:100_000]
        return Step([{"role": "user", "content": content}], 0.5, terminated=message.text == "bye")


async def test_the_sdks_own_server_passes_also_what_a_plain_game_cannot_show(uvicorn_server):
    """All else it passes in the tests of the project that `tide-env new` writes."""
    plan = Plan(
        actions=tuple({"role": "assistant", "content": words} for words in ("hello", "image", "large")),
        slow_action={"role": "assistant", "content": "slow"},
    )
    names = ["observation", "message", "pause.acting", "clock.turn", "end.acting"]
    async with uvicorn_server(EnvironmentServer(Talkative, capacity=8), lifespan="on") as url:
        subject = Reached(url, 10.0)
        await subject.open()
        results = await run_checks(subject, plan, select(names), 100.0, lambda _result: None)
        await subject.aclose()
    assert [(found.case.name, found.detail) for found in results if found.result != "pass"] == []


async def test_a_server_that_cannot_be_killed_skips_what_would_and_says_how(uvicorn_server):
    async with uvicorn_server(EnvironmentServer(Talkative), lifespan="on") as url:
        subject = Reached(url, 10.0)
        await subject.open()
        results = await run_checks(subject, Plan(), select(["kill"]), 100.0, lambda _result: None)
        await subject.aclose()
    assert [found.result for found in results] == ["skip", "skip"]
    assert all("--pid" in found.detail for found in results)


def test_a_failed_check_is_told_with_what_was_said_and_exits_with_1(tmp_path, capsys):
    files = ["--json", str(tmp_path / "out.json"), "--junit", str(tmp_path / "out.xml")]
    assert cli.main(["check", "--only", "message.reason", *files, "--", *SMALL, "reason_in_ascii"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL  message.reason" in shown
    assert "the contract says (The end): The reason of an end comes back as it was sent" in shown
    assert "POST /end" in shown
    (told,) = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert (told["result"], told["section"]) == ("fail", "The end")
    failure = ET.parse(tmp_path / "out.xml").getroot().find("testsuite/testcase/failure")
    assert "POST /end" in failure.text


@pytest.mark.parametrize(("strict", "code"), [([], 0), (["--strict"], 1)])
def test_a_skipped_check_fails_only_where_that_is_asked_for(capsys, strict, code):
    assert cli.main(["check", "--only", "observation.images", *strict, "--", *SMALL]) == code
    assert "skip  observation.images     no observation has an image" in capsys.readouterr().out


def test_a_command_finds_its_port_in_the_variables_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "said.py").write_text("from tide_sdk import Environment\nclass Said(Environment): pass\n")
    monkeypatch.chdir(tmp_path)
    serve = [sys.executable, "-m", "tide_sdk.cli", "serve", "said:Said"]
    assert cli.main(["check", "--only", "health.fields", "--", *serve]) == 0
    assert "Said, capacity 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "which server?"),
        (["http://127.0.0.1:1", "--boot-s", "0.2"], "not healthy within 0.2 s"),
        (["ftp://example.org"], "expected http://host"),
        (["localhost:8100"], "a URL begins with http://"),
        (["unix:relative"], "unix:/absolute/path"),
        (["http://127.0.0.1:1", "--only", "nothing"], "no such check; there are health,"),
        (["http://127.0.0.1:1", "--task", "[1]"], "--task must be a JSON object"),
        (["http://127.0.0.1:1", "--action", "{"], "--action '{'"),
        (["http://127.0.0.1:1", "--action", "@/nonexistent"], "No such file"),
        (["http://127.0.0.1:1", "--timeout-s", "0"], "--timeout-s must be above 0"),
        (["http://127.0.0.1:1", "--max-tasks", "0"], "--max-tasks must be at least 1"),
        (["http://127.0.0.1:1", "--token-file", "/nonexistent"], "--token-file"),
        (["--pid", "1", "--", "true"], "--pid is for a server at a URL"),
        (["--", "false"], "ended with exit code 1 before it was healthy"),
        (["--", "/nonexistent/server"], "cannot be started"),
    ],
)
def test_wrong_use_and_missing_servers_exit_with_2_and_one_line(capsys, arguments, words):
    assert cli.main(["check", *arguments]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert len(told.splitlines()) == 1


def test_the_list_names_every_check_with_its_sentence(capsys):
    assert cli.main(["check", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [case.name for case in ALL]


def test_every_check_has_a_name_of_its_own_and_a_section_of_the_contract():
    headings = {line.lstrip("# ") for line in (ROOT / "docs/contract.md").read_text().splitlines() if line[:1] == "#"}
    assert len({case.name for case in ALL}) == len(ALL)
    assert {case.section for case in ALL} <= headings
    assert [case.kills for case in ALL] == sorted(case.kills for case in ALL), "those that kill come last"


async def test_a_server_at_a_url_is_killed_by_its_pid_once_and_found_again(tmp_path):
    path = tmp_path / "env.sock"
    command = [word.replace("{uds}", str(path)) for word in SMALL]
    first = await asyncio.create_subprocess_exec(*command)
    subject = Reached(f"unix:{path}", 30.0, pid=first.pid)

    async def supervise():
        await first.wait()
        path.unlink()
        return await asyncio.create_subprocess_exec(*command)

    supervisor = asyncio.create_task(supervise())
    try:
        await subject.open()
        results = await run_checks(subject, Plan(), select(["kill"]), 60.0, lambda _result: None)
        second = await supervisor
        second.kill()
        await second.wait()
    finally:
        await subject.aclose()
    assert first.returncode == -signal.SIGKILL
    assert [(found.case.name, found.result) for found in results] == [("kill.lost", "pass"), ("kill.stop", "skip")]


@pytest.fixture
def certificate(tmp_path) -> Path:
    """Of localhost, signed by itself, with its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, day = ec.generate_private_key(ec.SECP256R1()), datetime.timedelta(1)
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "localhost")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "localhost.pem").write_bytes(private + signed.public_bytes(pem))
    return tmp_path / "localhost.pem"


class Guarded(SmallServer):
    """Asks for a key."""

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and (b"authorization", b"Bearer sesame") not in scope["headers"]:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
        else:
            await super().__call__(scope, receive, send)


async def test_a_server_with_tls_and_a_token_is_checked_like_any_other(uvicorn_server, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with uvicorn_server(Guarded(), ssl_certfile=str(certificate)) as url:
        secure = url.replace("http://127.0.0.1", "https://localhost")
        stranger = Reached(secure, 0.3)
        with pytest.raises(Unreachable, match="answered 401"):
            await stranger.open()
        await stranger.aclose()
        subject = Reached(secure, 10.0, token="sesame")
        await subject.open()
        names = ["http", "errors.too_large", "turn.dropped", "turn.repeat"]
        results = await run_checks(subject, Plan(), select(names), 60.0, lambda _result: None)
        await subject.aclose()
    assert [(found.case.name, found.detail) for found in results if found.result != "pass"] == []


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_check_leaves_no_server(tmp_path, sign):
    pid_file = tmp_path / "pid"
    server = ["sh", "-c", f'echo $$ > {pid_file}; exec "$@"', "sh", *SMALL]
    command = [sys.executable, "-m", "tide_sdk.cli", "check", "--only", "pause.timers", "--", *server]
    checking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert checking.stdout.readline().startswith("small at unix:/")
    checking.send_signal(sign)
    told = checking.communicate(timeout=30)[1]
    assert (checking.returncode, told) == (130, "tide-env: interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_what_a_server_leaves_behind_when_it_stops_is_killed(tmp_path):
    stubborn = f"trap '' TERM; echo $$ > {tmp_path}/pid; sleep 60"
    server = ["sh", "-c", 'sh -c "$0" & exec "$@"', stubborn, *SMALL]
    assert cli.main(["check", "--only", "kill.stop", "--", *server]) == 0
    status = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_checks_that_are_left_when_the_time_is_over_fail(capsys):
    assert cli.main(["check", "--total-s", "0.000001", "--only", "health", "--", *SMALL]) == 1
    words = "FAIL  health.tasks           not made: the time for all checks, 1e-06 s, is over"
    assert words in capsys.readouterr().out
