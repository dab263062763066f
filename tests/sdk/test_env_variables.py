"""`tide-env serve` in a container: what the command line leaves open comes from the variables that images set."""

from __future__ import annotations

import argparse

import pytest

from tide_sdk import serve


@pytest.fixture
def fill():
    def filled(line: str, **environ: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        serve.add_parser(parser.add_subparsers())
        arguments = parser.parse_args(["serve", *line.split()])
        serve.fill_in(arguments, environ)
        return arguments

    return filled


def test_variables_stand_in_for_arguments(fill):
    got = fill("", TIDE_ENVIRONMENT="a.b:C", TIDE_HOST="0.0.0.0", TIDE_PORT="8000", TIDE_CAPACITY="3")
    assert (got.target, got.host, got.port, got.uds, got.capacity) == ("a.b:C", "0.0.0.0", 8000, None, 3)


def test_a_socket_wins_over_the_port_that_an_image_has_by_default(fill):
    assert fill("a:B", TIDE_UDS="/run/tide/env.sock", TIDE_PORT="8000").uds == "/run/tide/env.sock"


@pytest.mark.parametrize("line", ["--uds /tmp/x", "--port 0", "--host ::1"])
def test_an_address_on_the_command_line_leaves_address_variables_unread(fill, line):
    got = fill(f"a:B {line}", TIDE_UDS="/elsewhere", TIDE_HOST="0.0.0.0", TIDE_PORT="8000")
    default = fill(f"a:B {line}")
    assert vars(got) == vars(default)


def test_a_socket_is_open_to_other_users_only_where_a_variable_names_it(fill):
    assert fill("a:B", TIDE_UDS="/x").uds_mode == 0o666
    assert fill("a:B --uds /x", TIDE_UDS="/x").uds_mode == 0o600


def test_an_argument_wins_over_its_variable(fill):
    got = fill("a:B --capacity 2", TIDE_ENVIRONMENT="c:D", TIDE_CAPACITY="3")
    assert (got.target, got.capacity) == ("a:B", 2)


def test_empty_variables_are_unset_ones(fill):
    got = fill("a:B", TIDE_ENVIRONMENT="", TIDE_UDS="", TIDE_HOST="", TIDE_PORT="", TIDE_CAPACITY="")
    assert (got.host, got.port, got.uds, got.capacity) == ("127.0.0.1", 0, None, None)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TIDE_ENVIRONMENT": "a:B", "TIDE_CAPACITY": "many"}, "TIDE_CAPACITY must be a whole number, not 'many'"),
        ({"TIDE_ENVIRONMENT": "a:B", "TIDE_PORT": "-1"}, "TIDE_PORT must be a whole number"),
        ({}, "set TIDE_ENVIRONMENT"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fill, environ, words):
    with pytest.raises(serve.ServeError, match=words):
        fill("", **environ)
