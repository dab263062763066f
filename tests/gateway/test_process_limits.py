"""What server processes get from the gateway, and what they do not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from runtime_bench_process import process_spec

from tide_gateway.runtimes import LaunchFailed
from tide_gateway.runtimes.process import ProcessRuntime

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "s3",
    "TIDE_GATEWAY_TOKENS": "o:t",
    "HF_TOKEN": "hf",
    "LC_ALL": "C",
    "OMP_X": "1",
    "TIDE_PROCESS_COOKIE": "c",
}


async def says(tmp_path: Path, code: str, **options) -> str:
    """What a server that runs this code and exits says last."""
    environ = os.environ | SECRETS
    spec = process_spec(sys.executable, "-c", f"{code} # {{uds}}", **options)
    runtime = ProcessRuntime(environ, tmp_path / "logs", str(tmp_path))
    with pytest.raises(LaunchFailed) as caught:
        await runtime.launch("one", 0, spec, 20.0)
    await runtime.close()
    return str(caught.value)


NAMES = "import os; print('<', *sorted(os.environ), '>')"


async def test_secrets_of_the_gateway_are_not_inherited(tmp_path):
    said = (await says(tmp_path, NAMES, env={"MINE": "1"})).split()
    assert {"PATH", "LC_ALL", "OMP_X", "MINE", "TIDE_INSTANCE", "TIDE_PROCESS_COOKIE"} <= set(said)
    assert not {"AWS_SECRET_ACCESS_KEY", "TIDE_GATEWAY_TOKENS", "HF_TOKEN"} & set(said)


@pytest.mark.parametrize("inherit", [["HF_TOKEN"], ["HF_*"]])
async def test_a_variable_that_the_operator_names_is_inherited(tmp_path, inherit):
    said = (await says(tmp_path, NAMES, process={"inherit": inherit})).split()
    assert "HF_TOKEN" in said
    assert "AWS_SECRET_ACCESS_KEY" not in said


@pytest.mark.parametrize("inherit", [["*"], ["TIDE_GATEWAY_TOKENS", "AWS_*"]])
async def test_the_gateways_own_settings_are_never_inherited(tmp_path, inherit):
    said = (await says(tmp_path, NAMES, process={"inherit": inherit})).split()
    assert "AWS_SECRET_ACCESS_KEY" in said
    assert "TIDE_GATEWAY_TOKENS" not in said


async def test_the_memory_limit_holds(tmp_path):
    code = "x = bytearray(400 * 2**20); print('enough')"
    assert "MemoryError" in await says(tmp_path, code, process={"memory_mb": 300})
    assert "enough" in await says(tmp_path, code)


async def test_the_limit_of_open_files_holds(tmp_path):
    code = "x = [open('/dev/null') for _ in range(64)]; print('enough')"
    assert "Too many open files" in await says(tmp_path, code, process={"max_open_files": 32})
    assert "enough" in await says(tmp_path, code)


async def test_the_limit_of_processes_is_set(tmp_path):
    code = "import resource as r; print('<', r.getrlimit(r.RLIMIT_NPROC), '>')"
    assert "< (77, 77) >" in await says(tmp_path, code, process={"max_processes": 77})


async def test_a_server_starts_without_privileges_to_gain_cores_to_dump_or_files_of_ours(tmp_path):
    secret = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(secret, True)
    code = (
        "import os, resource as r, signal as s; os.umask(u := os.umask(0)); st = open('/proc/self/status').read();"
        "print(oct(u), r.getrlimit(r.RLIMIT_CORE), 'NoNewPrivs:\\t1' in st, os.readlink('/proc/self/fd/0'),"
        "sorted(os.listdir('/proc/self/fd'))[:-1], s.pthread_sigmask(s.SIG_BLOCK, ()), "
        "hex(int([l for l in st.splitlines() if l.startswith('SigIgn')][0].split()[1], 16) & 0x7fffffff))"
    )
    try:
        said = await says(tmp_path, code)
    finally:
        os.close(secret)
    # SIGPIPE and SIGXFSZ are what this Python itself ignores; signals from 32 on are the C library's own.
    assert "0o77 (0, 0) True /dev/null ['0', '1', '2'] set() 0x1001000" in said
