"""Several processes on one machine: the mathematics of one, an end with a sentence, and a restart bit for bit."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from fathomgp.errors import SettingError
from fathomgp.fitting import start_distributed

HERE = pathlib.Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")])}


@pytest.fixture
def trips(rng, tmp_path):
    X = rng.normal(size=(400, 2))
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": np.sin(2.0 * X[:, 0]) + 0.1 * rng.normal(size=400)})
    frame.astype(np.float32).to_parquet(tmp_path / "trips.parquet", row_group_size=30, index=False)
    return tmp_path / "trips.parquet"


def start(trips, directory, *, processes, method, kill=(0, 0), devices=1):
    """Start the processes; ``kill`` holds, for each, the chunk at which it dies (0 for none)."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    directory.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def child(rank):
        words = (rank, processes, port, trips, directory / "checkpoint", directory / "out.npz", kill[rank], method)
        command = [sys.executable, str(HERE / "distributed_child.py"), *map(str, words)]
        return subprocess.Popen(command, env=ENVIRONMENT | {"XLA_FLAGS": flags}, stderr=subprocess.PIPE, text=True)

    return [child(rank) for rank in range(processes)]


def finish(children):
    """Exit codes and what was said."""
    try:
        said = [child.communicate(timeout=120)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    return [child.returncode for child in children], said


def arrays(directory):
    with np.load(directory / "out.npz") as found:
        return [found[name] for name in found.files]


@pytest.mark.slow
def test_two_devices_and_two_processes_compute_what_one_computes(trips, tmp_path):
    for processes, devices in ((1, 1), (1, 2), (2, 1)):
        directory = tmp_path / f"{processes}{devices}"
        codes, said = finish(start(trips, directory, processes=processes, method="dsvi", devices=devices))
        assert codes == [0] * processes, said
    for other in ("12", "21"):
        for one, two in zip(arrays(tmp_path / "11"), arrays(tmp_path / other), strict=True):
            assert np.allclose(one, two, rtol=0.0, atol=1e-6)


def test_a_lost_process_ends_the_job_and_a_restart_goes_on_bit_for_bit(trips, tmp_path, rng):
    calm = undisturbed(trips, tmp_path, "walk")
    lose_and_restart(trips, tmp_path / "lost", "walk", int(rng.integers(2)), int(rng.integers(3, 18)), calm)


@pytest.mark.slow
def test_either_process_of_a_deep_gp_may_be_lost_at_any_chunk(trips, tmp_path, rng):
    calm = undisturbed(trips, tmp_path, "dsvi")
    for victim in (0, 1):
        for chunk in rng.choice(np.arange(3, 18), 3, replace=False):
            lose_and_restart(trips, tmp_path / f"{victim}-{chunk}", "dsvi", victim, int(chunk), calm)


def undisturbed(trips, tmp_path, method):
    """What two processes learn that nobody kills."""
    codes, said = finish(start(trips, tmp_path / "calm", processes=2, method=method))
    assert codes == [0, 0], said
    return arrays(tmp_path / "calm")


def lose_and_restart(trips, directory, method, victim, chunk, calm):
    """Kill a process: the other one ends by itself with a sentence; started again, both learn what ``calm`` holds."""
    kill = [chunk if rank == victim else 0 for rank in (0, 1)]
    codes, said = finish(start(trips, directory, processes=2, method=method, kill=kill))
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] not in (0, None)
    assert "lost another process" in said[1 - victim] or "another task died" in said[1 - victim]
    codes, said = finish(start(trips, directory, processes=2, method=method))
    assert codes == [0, 0], said
    for one, two in zip(calm, arrays(directory), strict=True):
        assert np.array_equal(one, two)


def test_half_an_address_is_refused():
    with pytest.raises(SettingError, match=r"needs the coordinator, the number of processes and the rank"):
        start_distributed("localhost:1234")
    with pytest.raises(SettingError, match=r"The rank is 2, but 2 processes are numbered from 0"):
        start_distributed("localhost:1234", 2, 2)
