"""A release of JAX is admitted only if it does not hang on two independent batched Choleskys in one compiled loop."""

import os
import subprocess
import sys

import pytest

TIME_LIMIT = 120

PATTERN = """
import jax, jax.numpy as jnp

@jax.jit
def run(A, B):
    def body(_, total):
        grow = 1.0 + 1e-3 * jnp.tanh(total)
        first, second = jnp.linalg.cholesky(A * grow), jnp.linalg.cholesky(B * grow)
        return total + 1e-6 * (first[0, 0, 0] + second[0, 0, 0])
    return jax.lax.fori_loop(0, 400, body, jnp.zeros(()))

X = jax.random.normal(jax.random.key(0), (2, 50, 50, 50))
K = X @ jnp.swapaxes(X, -1, -2) / 50 + jnp.eye(50)
assert bool(jnp.isfinite(run(K[0], K[1])))
print("ended")
"""


def test_independent_batched_choleskys_end():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PATTERN], timeout=TIME_LIMIT, capture_output=True, text=True, env=environment
        )
    except subprocess.TimeoutExpired:
        pytest.fail(
            f"Two independent batched Choleskys in one compiled loop did not end within {TIME_LIMIT} s. JAX 0.10.0 to "
            "0.10.2 deadlock here when the thread pool is small: keep the pin of jax in pyproject.toml."
        )
    assert done.returncode == 0, done.stderr
    assert "ended" in done.stdout
