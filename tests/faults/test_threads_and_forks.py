"""Fits beside other threads, and processes that were forked from one that has fitted."""

import multiprocessing
import threading
import warnings

import jax
import numpy as np
import pytest

from fathomgp import DeepGPRegressor
from fathomgp.errors import DataWarning, ForkedProcessError


@pytest.fixture
def rows(rng):
    X = rng.normal(size=(20, 1))
    return X, np.sin(X[:, 0])


def quiet(**settings):
    return DeepGPRegressor("exact", max_iter=2, random_state=0, verbose=False, **settings)


def test_messages_hold_no_warning_of_another_thread(rows, flag_off):
    stop = threading.Event()

    def chatter():
        while not stop.wait(0.001):
            warnings.warn("a neighbour's business", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        neighbour = threading.Thread(target=chatter)
        neighbour.start()
        try:
            model = quiet().fit(*rows)
        finally:
            stop.set()
            neighbour.join()
    assert model.messages_ == []


def test_fits_side_by_side_keep_their_messages_apart(rows, flag_off):
    X, y = rows
    constant, quiet_one = quiet(), quiet()

    def fit(model, targets):
        model.fit(X, targets)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [
            threading.Thread(target=fit, args=(constant, np.ones(len(X)))),
            threading.Thread(target=fit, args=(quiet_one, y)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert quiet_one.messages_ == []
    assert len([message for message in constant.messages_ if "is constant" in message]) == 1


def test_warnings_of_a_fit_are_given_to_its_caller_once(rows, flag_off):
    X, _ = rows
    with pytest.warns(DataWarning) as caught:
        model = quiet().fit(X, np.ones(len(X)))
    said = [str(warning.message) for warning in caught]
    assert sorted(set(said)) == sorted(said)
    assert set(said) <= set(model.messages_)


def answer(model, X, pipe):
    try:
        pipe.send(model.predict(X))
    except BaseException as error:
        pipe.send(error)


def test_a_forked_process_is_refused_in_words(rows, flag_off):
    model = quiet().fit(*rows)
    here, there = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn of forks
        child = multiprocessing.get_context("fork").Process(target=answer, args=(model, rows[0], there))
        child.start()
    try:
        assert here.poll(60), "the forked process hangs"
        error = here.recv()
    finally:
        child.kill()
    assert isinstance(error, ForkedProcessError)
    assert "was forked from one that had used JAX" in str(error)
    assert "spawn" in str(error)
    assert jax.devices()  # this process goes on
