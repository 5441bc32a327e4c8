"""Strict mode for every test: dtype and rank promotion are errors, so are warnings, and array shapes are checked.

Tests run with 64-bit floats on, because they call the pieces directly; a test of a public entry point that must switch
float64 on by itself takes the fixture ``flag_off``. The seed contract: a test passes for any ``FATHOMGP_TEST_SEED``.
"""

import gc
import os
import pathlib

# Tests compile hundreds of tiny programs and run each a few times: XLA's optimiser would cost more than it saves.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")

from jaxtyping import install_import_hook

_HOOK = install_import_hook("fathomgp", "typechecker.check")
_HOOK.__enter__()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("fathomgp", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("fathomgp")

_SHARED_DATA = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
if "FATHOMGP_DATA" not in os.environ and _SHARED_DATA.is_dir():
    os.environ["FATHOMGP_DATA"] = str(_SHARED_DATA)


def pytest_collection_modifyitems(items):
    if "FATHOMGP_DATA" in os.environ:
        return
    skip = pytest.mark.skip(reason="FATHOMGP_DATA names no directory with the real datasets")
    for item in items:
        if "data" in item.keywords:
            item.add_marker(skip)


def pytest_runtest_teardown(item, nextitem):
    """Drop compiled programs before a worker reaches Linux's limit on memory maps (65,530), where XLA aborts."""
    maps = pathlib.Path("/proc/self/maps")  # looked at after about every eighth test
    if hash(item.name) % 8 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("FATHOMGP_TEST_SEED", "0"))


@pytest.fixture
def key(seed):
    return jax.random.key(seed)


@pytest.fixture
def rng(seed) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(params=["float32", "float64"])
def dtype(request) -> np.dtype:
    return np.dtype(request.param)


@pytest.fixture
def flag_off():
    """JAX as a user finds it: 32-bit by default, ordinary promotion."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def as_given(flag_off):
    """No type checks from outside: what a user passes arrives at the library, whatever it is."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def run(flag_off):
    """Run a command as a user finds JAX, and give its result."""

    def invoke(*arguments, code=0):
        from typer.testing import CliRunner

        from fathomgp.cli import app

        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return invoke
