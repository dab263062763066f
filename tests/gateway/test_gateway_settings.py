"""`environments.toml` and tokens: every mistake names the field and the fix."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tide_gateway import cli
from tide_gateway.auth import Owners
from tide_gateway.roles import Caller
from tide_gateway.settings import SettingsError, check_bind, load_settings, parse_environments
from tide_sdk.clocks import ClockName
from tide_sdk.errors import TideError

GOOD = """
[environments.babyai]
command = ["tide-env", "serve", "tide_environments.babyai:BabyAI", "--uds", "{uds}", "--capacity", "{capacity}"]
env = { LEVEL = "BabyAI-GoToObj-v0" }
capacity = 10
servers = 3
[environments.babyai.limits]
idle = 1.5
"""


def test_a_good_file_fills_in_the_defaults():
    spec = parse_environments(tomllib.loads(GOOD))["babyai"]
    assert (spec.name, spec.runtime, spec.tasks_per_server) == ("babyai", "process", 4)
    assert spec.all_limits[ClockName.IDLE] == 1.5
    assert spec.all_limits[ClockName.TURN] == 120.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no environment"),
        ("[enviroments.x]", "unknown key 'enviroments'"),
        ("[environments]\nx = 1", "environments.x: must be a table"),
        (GOOD + "nap = 1", "environments.babyai.limits.nap"),
        (GOOD.replace("capacity =", "capacty ="), "environments.babyai.capacty: unknown key; known are"),
        (GOOD.replace("= 10", '= "many"'), "environments.babyai.capacity"),
        (GOOD.replace("= 10", "= 0"), "environments.babyai.capacity"),
        (GOOD.replace("= 3", "= 11"), "environments.babyai.servers: 11 is more than capacity 10"),
        (GOOD.replace("1.5", "inf"), "environments.babyai.limits.idle"),
        (GOOD.replace("{uds}", "/tmp/x"), "exactly one of {uds}, {announce}, {port}"),
        (GOOD.replace("{capacity}", "{port}"), "exactly one of {uds}, {announce}, {port}"),
        (GOOD.replace("capacity = 10", 'runtime = "podman"'), "environments.babyai.runtime"),
        (GOOD.replace("capacity = 10", 'runtime = "fake"'), "the fake runtime takes none"),
        (GOOD.replace("capacity = 10", 'name = "other"'), "differs from the table's name"),
        ('[environments."a b"]\nruntime = "fake"', "environments.a b.name"),
        ('[environments.x]\nruntime = "process"', "command: missing"),
        ('[environments.x]\nruntime = "fake"\nprocess = { memory_mb = 512 }', "x.process: only for runtime"),
        ('[environments.x]\nruntime = "fake"\nenv = { A = "b" }', "x.env: the fake runtime takes none"),
        ('[environments.x]\nruntime = "docker"\ndocker = { image = "i", cpus = 1e-10 }', "x.docker.cpus"),
        ('[environments.x]\nruntime = "ray"\nray = { resources = { a = inf } }', "x.ray.resources.a"),
    ],
)
def test_mistakes_are_named(text, words):
    with pytest.raises(SettingsError) as caught:
        parse_environments(tomllib.loads(text))
    assert words in str(caught.value)


def read(tmp_path, environ):
    path = tmp_path / "environments.toml"
    path.write_text(GOOD)
    return load_settings(path, environ)


def test_tokens_come_from_a_variable_or_a_file_and_are_not_passed_on(tmp_path):
    settings = read(tmp_path, {"TIDE_GATEWAY_TOKENS": "ann:0123456789abcdef, bob:fedcba9876543210", "HOME": "/h"})
    assert sorted(caller.owner for caller in settings.tokens.values()) == ["ann", "bob"]
    assert {caller.role for caller in settings.tokens.values()} == {"agent"}
    assert settings.process_environment == {"HOME": "/h"}
    assert "0123456789abcdef" not in repr(settings)
    file = tmp_path / "tokens"
    file.write_text("# people, machines: all\nann:0123456789abcdef\n\n  ann/operator:1123:56789abcdef\n")
    assert read(tmp_path, {"TIDE_GATEWAY_TOKENS_FILE": str(file)}).tokens == {
        "0123456789abcdef": Caller("ann", "agent"),
        "1123:56789abcdef": Caller("ann", "operator"),
    }


def test_the_databases_password_is_not_passed_on_in_any_runtime(tmp_path):
    assert read(tmp_path, {"PGPASSWORD": "secret", "PGUSER": "tide", "HOME": "/h"}).process_environment == {
        "HOME": "/h"
    }


@pytest.mark.parametrize(
    "environ",
    [
        {"TIDE_GATEWAY_TOKENS": "0123456789abcdef"},
        {"TIDE_GATEWAY_TOKENS": "ann:short"},
        {"TIDE_GATEWAY_TOKENS": "ann/boss:0123456789abcdef"},
        {"TIDE_GATEWAY_TOKENS": "ann/:0123456789abcdef"},
        {"TIDE_GATEWAY_TOKENS": "ann:0123456789abcdef\u00e9"},
        {"TIDE_GATEWAY_TOKENS": "ann:" + "0123456789abcdef" * 20},
        {"TIDE_GATEWAY_TOKENS": "ann:0123456789abcdef,bob:0123456789abcdef"},
        {"TIDE_GATEWAY_TOKENS": "ann:0123456789abcdef", "TIDE_GATEWAY_TOKENS_FILE": "/x"},
        {"TIDE_GATEWAY_TOKENS_FILE": "/no/such/file"},
        {"TIDE_GATEWAY_TOKENS_FILE": "/dev/null"},
    ],
)
def test_wrong_tokens_are_refused_without_being_shown(tmp_path, environ):
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, environ)
    assert "0123456789abcdef" not in str(caught.value)


def test_g27_strangers_are_only_let_in_with_tokens(tmp_path):
    settings = read(tmp_path, {})
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        check_bind(host, settings, has_keys=False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(SettingsError):
            check_bind(host, settings, has_keys=False)
    check_bind("0.0.0.0", settings, has_keys=True)
    check_bind("0.0.0.0", read(tmp_path, {"TIDE_GATEWAY_TOKENS": "ann:0123456789abcdef"}), has_keys=False)


async def test_owners_by_token():
    ann, bob = Caller("ann", "agent"), Caller("bob", "operator")
    owners = Owners({"0123456789abcdef": ann, "fedcba9876543210": bob})
    assert await owners.caller(b"Bearer 0123456789abcdef") == ann
    assert await owners.caller(b"bearer  fedcba9876543210 ") == bob
    long = b"Bearer " + b"0123456789abcdef" * 100
    for header in (None, b"", b"Bearer", b"Bearer ", b"Basic 0123456789abcdef", b"Bearer 0123456789abcde\xff", long):
        with pytest.raises(TideError) as caught:
            await owners.caller(header)
        assert caught.value.code == "unauthorized"
    assert await Owners({}).caller(None) == Caller("local", "operator")


def test_the_table_of_environments(tmp_path, capsys):
    path = tmp_path / "environments.toml"
    path.write_text(GOOD)
    assert cli.main(["environments", "--config", str(path)]) == 0
    table = capsys.readouterr().out
    assert "babyai" in table
    assert "idle=1.5" in table
    path.write_text("[environments.x]\nnap = 1")
    assert cli.main(["environments", "--config", str(path)]) == 2
    assert "environments.x.nap: unknown key" in capsys.readouterr().err


def test_the_command_line_parses_without_heavy_imports():
    script = "import sys, tide_gateway.cli as c; c.make_parser(); print({'sqlalchemy', 'fastapi'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "set()", run.stderr
