"""A process that goes on fitting gives its programs back."""

import gc

import numpy as np
import pytest

from fathomgp import DeepGPRegressor
from fathomgp.compilation import memory_maps, programs


@pytest.mark.slow
@pytest.mark.skipif(memory_maps() is None, reason="this system does not tell its memory maps")
def test_memory_maps_stay_bounded_over_many_shapes(flag_off):
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(1000, 9))
    y = np.sin(5.0 * X[:, 0])

    def fit(rows, columns, method):
        settings = {} if method == "exact" else {"num_inducing": 5}
        model = DeepGPRegressor(method, max_iter=1, random_state=0, **settings).fit(X[:rows, :columns], y[:rows])
        model.sample_y(X[:3, :columns], 2)

    most = programs.most
    programs.limit(most=20)
    try:
        maps = []
        for columns in range(1, 10):  # every number of columns is new to every program
            fit(30, columns, ("exact", "dsvi", "sghmc")[columns % 3])
            gc.collect()
            maps.append(memory_maps())
        assert len(programs) <= 21
        assert maps[-1] - maps[3] < 0.6 * (maps[3] - maps[0]) + 500
    finally:
        programs.limit(most=most)
