"""Processes of a distributed fit that never come, and where the coordinator listens."""

import ast
import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import pytest

from fathomgp.errors import FitWarning, SettingError
from fathomgp.fitting import _rendezvous, start_distributed

SOURCE = pathlib.Path(__file__).parents[2] / "src"
CHILD = textwrap.dedent("""
    import sys
    from fathomgp.errors import FathomError
    from fathomgp.fitting import start_distributed
    try:
        start_distributed(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]), patience=float(sys.argv[3]))
    except FathomError as error:
        sys.exit(f"Error: {error}")
    import jax
    print(jax.process_count(), flush=True)
    if sys.argv[2] == "0":
        sockets = open("/proc/net/tcp").read() + open("/proc/net/tcp6").read()
        port = f":{int(sys.argv[1]):04X}"
        print([line.split()[1] for line in sockets.splitlines() if port in line.split()[1] and line.split()[3] == "0A"])
    jax.distributed.shutdown()
""")


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(port, rank, patience):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(port), str(rank), str(patience)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_that_never_comes_is_named():
    children = [start(free_port(), rank, 2) for rank in (0, 1)]  # two jobs, each without the other half
    said = [child.communicate(timeout=100)[1] for child in children]
    assert [child.returncode for child in children] == [1, 1]
    assert "Of 2 processes, those of rank 1 did not come within 2 s" in said[0]
    assert "did not call within 2 s: start process 0 there" in said[1]
    assert not any("stack trace" in text for text in said)


@pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
def test_processes_that_come_find_each_other_on_the_loopback_only():
    port = free_port()
    children = [start(port, rank, 60) for rank in (1, 0)]
    said = [child.communicate(timeout=100) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert said[0][0] == "2\n"
    listening = said[1][0].splitlines()[1]
    places = [place.split(":")[0] for place in ast.literal_eval(listening)]
    assert places
    assert all(place.endswith(("0100007F", "0" * 24 + "01000000")) for place in places)


def test_a_foreign_address_is_told_to_mean_all_interfaces():
    with pytest.warns(FitWarning, match=r"192\.0\.2\.1 is no address of this machine .* all interfaces"):
        assert _rendezvous.bind_address("192.0.2.1:9911") == "[::]:9911"
    assert _rendezvous.bind_address("localhost:9911") == "localhost:9911"


@pytest.mark.parametrize("address", ["localhost", "localhost:", "localhost:0", "localhost:99999", "a b:1", ":80"])
def test_half_an_address_is_refused(address):
    with pytest.raises(SettingError, match="give host:port"):
        start_distributed(address, 2, 1)


def test_a_port_in_use_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=r"cannot listen at 127\.0\.0\.1:\d+ \(.*in use"):
            start_distributed(f"127.0.0.1:{port}", 2, 0)
