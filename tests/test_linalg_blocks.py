"""Sums over blocks of rows: what they add up to, and their gradients, do not depend on the blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp.linalg import sum_blocks


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_blocks_change_neither_sums_nor_gradients(count, recompute, rng):
    rows = {"x": jnp.asarray(rng.normal(size=(20, 3))), "weight": jnp.ones(20), "flag": jnp.ones(20, bool)}
    shift = jnp.asarray(rng.normal(size=3))

    def sums(rows, shift):
        used = jnp.where(rows["flag"], rows["weight"], 0.0)  # rows that fill up a block add nothing
        return {"gram": (rows["x"] + shift[None]).T @ (used[:, None] * rows["x"]), "count": jnp.sum(used)}

    def total(shift):
        found = sum_blocks(lambda rows: sums(rows, shift), rows, count, recompute=recompute)
        return jnp.sum(found["gram"] ** 2), found

    (value, found), gradient = jax.value_and_grad(total, has_aux=True)(shift)
    expected = sums(rows, shift)
    assert np.allclose(found["gram"], expected["gram"], rtol=1e-12)
    assert found["count"] == 20
    assert np.allclose(value, jnp.sum(expected["gram"] ** 2), rtol=1e-12)
    plain = jax.grad(lambda shift: jnp.sum(sums(rows, shift)["gram"] ** 2))(shift)
    assert np.allclose(gradient, plain, rtol=1e-10)
