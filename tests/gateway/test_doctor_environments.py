"""The doctor looks at each environment in its runtime's way."""

from __future__ import annotations

import asyncio
import json

import pytest
from remote_peer import Peer


def test_commands_that_cannot_be_run_fail(doctor, tmp_path):
    script = tmp_path / "serve.sh"
    script.write_text("#!/bin/sh\n")
    tables = {"none": "no-such-command", "plain": str(script), "well": "sh"}
    doctor.config.write_text("".join(f'[environments.{n}]\ncommand = ["{c}", "{{uds}}"]\n' for n, c in tables.items()))
    code, found = doctor.look()
    assert code == 1
    assert "is not found" in found["environment none"][0]["says"]
    assert found["environment plain"][0]["fix"] == f"chmod +x {script}"
    assert found["environment well"][0]["level"] == "ok"


async def test_remote_servers_are_asked_for_their_health(doctor):
    async with Peer().serve() as peer, Peer().serve() as other:
        other.health["contract"] = 9
        urls = [f"http://127.0.0.1:{port}" for port in (peer.port, other.port, 1)]
        doctor.config.write_text(
            '[environments.far]\nruntime = "remote"\nservers = 3\ncapacity = 24\n'
            f"[environments.far.remote]\nallow_private = true\nurls = {json.dumps(urls)}\n"
        )
        code, found = await asyncio.to_thread(doctor.look)
    assert code == 1
    small, wrong, away = found["environment far"]
    assert (small["level"], "holds 4 tasks, not the 8 configured" in small["says"]) == ("warn", True)
    assert "speaks contract 9" in wrong["says"]
    assert (away["level"], urls[2] in away["says"]) == ("fail", True)


@pytest.mark.ray
def test_a_ray_cluster_that_is_away_fails(doctor):
    doctor.config.write_text(
        '[environments.far]\nruntime = "ray"\ncommand = ["x", "{port}"]\n'
        '[environments.far.ray]\naddress = "127.0.0.1:1"\n'
    )
    doctor.one("environment far", "fail", "nothing answers at 127.0.0.1:1")


def test_an_engine_that_is_away_fails(doctor, tmp_path):
    doctor.config.write_text(
        '[environments.box]\nruntime = "docker"\n'
        f'[environments.box.docker]\nimage = "x"\nengines = ["unix://{tmp_path}/no.sock"]\n'
    )
    doctor.one(f"engine unix://{tmp_path}/no.sock", "fail", "does not answer")


@pytest.mark.docker
def test_engines_and_images_are_looked_at_and_nothing_is_pulled(doctor):
    from docker_engine import IMAGE, OTHER_IMAGE, shared_engine

    url = shared_engine().url
    images = {"well": IMAGE, "none": "no-such-image", "foreign": OTHER_IMAGE}
    lines = [
        f'[environments.{name}]\nruntime = "docker"\n[environments.{name}.docker]\nimage = "{image}"\n'
        f'engines = ["{url}"]\npull = "never"\n'
        for name, image in images.items()
    ]
    lines.append('mounts = ["/no/such:/x"]\nruntime = "runsc"\nnetwork = "no-such"\n')
    doctor.config.write_text("".join(lines))
    code, found = doctor.look()
    assert code == 1
    assert "cgroup" in found[f"engine {url}"][0]["says"]
    assert found["environment well"][0]["level"] == "ok"
    assert "is not there" in found["environment none"][0]["says"]
    says = " | ".join(each["says"] for each in found["environment foreign"])
    for words in ("is built for", "/no/such is not there", "has no runsc", "has no no-such"):
        assert words in says
