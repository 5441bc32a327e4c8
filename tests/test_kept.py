"""Programs that are kept between processes: found again by another, in a directory of the user's own."""

import os
import pathlib
import stat
import subprocess
import sys

import pytest

import fathomgp
from fathomgp.errors import SettingError
from fathomgp.kept import VARIABLE

SCRIPT = """
import sys
import numpy as np
import fathomgp
if len(sys.argv) > 1:
    fathomgp.keep_compiled(sys.argv[1])
import jax
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
X = np.linspace(0.0, 1.0, 12)[:, None]
fathomgp.DeepGPRegressor("exact", max_iter=2, random_state=0).fit(X, np.sin(6.0 * X[:, 0])).predict(X)
print(found.count("/jax/compilation_cache/cache_hits"), found.count("/jax/compilation_cache/cache_misses"))
"""


def _run(*arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    answer = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    return tuple(map(int, answer.stdout.split()))


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    hits, _ = _run(tmp_path / "programs")
    again, _ = _run(**{VARIABLE: str(tmp_path / "programs")})
    assert again > hits
    (place,) = (tmp_path / "programs").iterdir()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    for entry in place.glob("*-cache"):  # damaged entries are compiled again
        entry.write_bytes(b"damaged")
    assert _run(tmp_path / "programs")[1] >= 0


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files here")
def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    with pytest.raises(SettingError, match="belongs to another user: compiled programs are code"):
        fathomgp.keep_compiled(tmp_path)


def test_a_place_that_cannot_be_made_is_refused(tmp_path):
    pathlib.Path(tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="Compiled programs cannot be kept in"):
        fathomgp.keep_compiled(tmp_path / "file")
