"""What an engine is asked to create, and which options are refused; no engine is needed."""

from __future__ import annotations

import os
import socket
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from tide_gateway.runtimes import LaunchFailed
from tide_gateway.runtimes.docker_container import Way, container_config, container_name, network_config
from tide_gateway.runtimes.docker_sdk import SdkMissing, require_sdk
from tide_gateway.runtimes.docker_ways import MAX_SOCKET_PATH_BYTES, Ways
from tide_gateway.specs import DockerOptions, EnvironmentSpec

UDS = Way(folder="/run/tide-gateway/abc")


def spec_of(command: tuple[str, ...] = (), **options) -> EnvironmentSpec:
    values = {"name": "maze", "runtime": "docker", "command": command, "capacity": 8, "servers": 2}
    return EnvironmentSpec.model_validate(values | {"docker": {"image": "maze:1"} | options})


def config_of(spec: EnvironmentSpec, way: Way = UDS) -> dict:
    assert spec.docker is not None
    return container_config("abc", "maze-1", spec, spec.docker, way)


def test_a_container_is_locked_down_unless_the_table_says_otherwise():
    config = config_of(spec_of())
    host = config["HostConfig"]
    assert config["User"] == "65534:65534"
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["Init"] is True
    assert host["RestartPolicy"] == {"Name": "no"}
    assert host["Memory"] == host["MemorySwap"] == 1024 * 1024 * 1024
    assert (host["NanoCpus"], host["PidsLimit"]) == (1_000_000_000, 256)
    assert set(host["Tmpfs"]) == {"/tmp"}
    assert host["LogConfig"]["Config"]["max-size"]


def test_a_container_says_whose_it_is():
    assert config_of(spec_of())["Labels"] == {
        "tide.deployment": "abc",
        "tide.instance": "maze-1",
        "tide.environment": "maze",
    }


def test_the_server_is_told_where_to_listen_and_for_how_many():
    assert {"TIDE_UDS=/run/tide/env.sock", "TIDE_CAPACITY=4", "TIDE_INSTANCE=maze-1"} <= set(
        config_of(spec_of())["Env"]
    )
    assert "TIDE_PORT=8000" in config_of(spec_of(connect="bridge"), Way(port=8000, network="net"))["Env"]


def test_a_command_replaces_the_images_own_with_its_places_filled_in():
    assert "Cmd" not in config_of(spec_of())
    assert config_of(spec_of(("serve", "--uds={uds}", "{capacity}")))["Cmd"] == [
        "serve",
        "--uds=/run/tide/env.sock",
        "4",
    ]


@pytest.mark.parametrize("word", ["{port}", "{announce}"])
def test_a_command_that_asks_for_what_a_socket_does_not_have_is_refused(word):
    with pytest.raises(LaunchFailed, match=r"command: holds .* gives {uds}"):
        config_of(spec_of(("serve", word)))


def test_mounts_are_read_only_and_only_the_sockets_folder_is_not():
    mounts = config_of(spec_of(mounts=["/data:/data"]))["HostConfig"]["Mounts"]
    assert [(mount["Source"], mount["ReadOnly"]) for mount in mounts] == [("/data", True), (UDS.folder, False)]


def test_names_are_deterministic_and_stay_apart():
    assert container_name("abc", "maze-1") == "tide-abc-maze-1"
    assert container_name("abc", "maze/1") != container_name("abc", "maze_1")
    assert container_name("abc", "maze/1") == container_name("abc", "maze/1")


def test_the_deployments_networks_lead_nowhere_and_have_names_of_their_own():
    internal, published = (network_config("abc", kind, "1f") for kind in ("internal", "published"))
    assert internal["internal"] is True
    assert published["internal"] is False
    assert published["options"]["com.docker.network.bridge.enable_ip_masquerade"] == "false"
    assert all(config["options"]["com.docker.network.bridge.enable_icc"] == "false" for config in (internal, published))
    assert internal["name"] == "tide-abc-1f"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engines": ["tcp://far:2376"]}, "engines: connect"),
        ({"engines": ["ssh://far"]}, "engines"),
        ({"mounts": ["data:/data"]}, "mounts"),
        ({"platform": "arm64"}, "platform"),
        ({"connect": "host", "network": "other"}, "network: connect"),
        ({"address": "10.0.0.1"}, "address: only for"),
    ],
)
def test_options_that_cannot_work_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        DockerOptions.model_validate({"image": "maze:1"} | options)


async def test_a_folder_too_deep_for_sockets_is_refused_at_once():
    with pytest.raises(ValueError, match=r"run_dir: .* too long"):
        Ways("abc", Path("/" + "x" * MAX_SOCKET_PATH_BYTES))


async def test_a_socket_that_only_its_owner_may_use_is_explained(tmp_path, monkeypatch):
    ways = Ways("abc", Path("/tmp/tide-x"))
    monkeypatch.setattr(Ways, "socket", lambda *_: tmp_path / "env.sock")
    assert ways.blocked("one") == ""
    (tmp_path / "env.sock").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert 'set user = "' in ways.blocked("one")


def nest(folder: Path, depth: int) -> None:
    """Folders within folders, made as a container can: a path of that length is longer than any call takes."""
    number = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=number)
        below = os.open("d", os.O_RDONLY, dir_fd=number)
        os.close(number)
        number = below
    os.close(number)


@pytest.fixture
def run_dir(tmp_path):
    """Removed whatever is in it: pytest could not."""
    yield tmp_path
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True, timeout=60)


async def test_what_a_container_left_is_removed_however_deep(run_dir):
    ways = Ways("abc", run_dir)
    folder = ways._make_folder("one")
    nest(folder, 3000)
    (run_dir / "outside").mkdir()
    (run_dir / "outside" / "file").touch()
    (folder / "link").symlink_to(run_dir / "outside")
    ways.remove("one")
    assert [path.name for path in run_dir.iterdir()] == ["outside"]
    assert (run_dir / "outside" / "file").exists()


async def test_sealing_leaves_the_socket_alone(run_dir):
    ways = Ways("abc", run_dir)
    folder = ways._make_folder("one")
    nest(folder, 3000)
    (folder / "file").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(ways.socket("one")))
        ways.seal("one")
    assert list(folder.iterdir()) == [ways.socket("one")]


def test_an_empty_folder_called_docker_is_not_taken_for_the_library(monkeypatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SdkMissing, match=r"pip install 'tiderl\[docker\]'"):
        require_sdk()
