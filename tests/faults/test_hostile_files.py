"""Model files changed by hand and sealed again: refused with a sentence, and nothing of them is believed."""

import shutil
import tracemalloc

import numpy as np
import pytest

from fathomgp import DeepGPClassifier, DeepGPRegressor, load
from fathomgp.errors import ModelFileError
from tampering import read_description, write_description


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    import jax

    directory = tmp_path_factory.mktemp("saved")
    X = np.linspace(0.0, 1.0, 12)[:, None]
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        DeepGPRegressor("exact", max_iter=2, random_state=0, verbose=False).fit(X, X[:, 0]).save(directory)
    return directory


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


def array_of(items, at):
    """The place of an array in a description."""
    found = items[at]
    assert found["is"] in ("jax", "numpy")
    return found


CHANGES = {
    "no content": lambda d, c, p, f: d.pop("content"),
    "no list of arrays": lambda d, c, p, f: d.pop("tensors"),
    "no params": lambda d, c, p, f: c.pop("params"),
    "no fitted": lambda d, c, p, f: c.pop("fitted"),
    "no posterior": lambda d, c, p, f: f.pop("posterior_"),
    "content is a list": lambda d, c, p, f: d.update(content=[1]),
    "900 nested lists": lambda d, c, p, f: p.update(kernel=nested(900)),
    "90 nested lists": lambda d, c, p, f: p.update(kernel=nested(90)),
    "a long name of an array": lambda d, c, p, f: f.update(classes_={"is": "numpy", "at": "x" * 300}),
    "an array named twice": lambda d, c, p, f: f.update(classes_=c["items"]["fitted"]["items"]["x_scaler_"]),
    "an unknown type": lambda d, c, p, f: f.update(_dtype={"is": "dtype", "name": "O"}),
    "a foreign type": lambda d, c, p, f: f.update(_dtype={"is": "dtype", "name": "datetime64"}),
    "strings of a width": lambda d, c, p, f: f.update(
        classes_={"is": "strings", "items": ["a"], "shape": [1], "dtype": "<U500000000"}
    ),
    "strings of a shape": lambda d, c, p, f: f.update(
        classes_={"is": "strings", "items": ["a"], "shape": [10**30], "kind": "U"}
    ),
    "strings that are numbers": lambda d, c, p, f: f.update(
        classes_={"is": "strings", "items": [1], "shape": [1], "kind": "O"}
    ),
    "a method is an attribute": lambda d, c, p, f: f.update(predict="gone"),
    "the class is an attribute": lambda d, c, p, f: f.update(__class__="gone"),
    "a checkpoint's place": lambda d, c, p, f: p.update(checkpoint="/somewhere"),
    "callbacks": lambda d, c, p, f: p.update(callbacks=["x"]),
    "an unknown parameter": lambda d, c, p, f: p.update(colour="red"),
    "params of wrong types": lambda d, c, p, f: p.update(num_inducing="many"),
    "a method that is a number": lambda d, c, p, f: p.update(method=5),
    "a seed that is text": lambda d, c, p, f: f.update(_seed="0"),
    "messages that are numbers": lambda d, c, p, f: f.update(messages_=[1]),
    "a posterior that is a scaler": lambda d, c, p, f: f["posterior_"].update(tag="data/standardizer"),
    "an unknown tag": lambda d, c, p, f: f["posterior_"].update(tag="posterior/none"),
    "a tag that is a list": lambda d, c, p, f: f["posterior_"].update(tag=[1]),
    "an arbitrary class": lambda d, c, p, f: f["posterior_"].update(tag="os.system"),
    "a field too many": lambda d, c, p, f: f["posterior_"]["fields"].update(colour=1),
    "a field too few": lambda d, c, p, f: f["posterior_"]["fields"].pop("alpha"),
    "fewer inputs than the model": lambda d, c, p, f: f.update(n_features_in_=7),
    "inputs without end": lambda d, c, p, f: f.update(n_features_in_=10**12),
    "a number of 40 digits": lambda d, c, p, f: f.update(_seed=10**40),
    "an enormous number": lambda d, c, p, f: f.update(fit_seconds_={"is": "float", "hex": "0x1p99999"}),
    "an estimator that is a list": lambda d, c, p, f: c["items"].update(estimator=["x"]),
    "an unknown kind": lambda d, c, p, f: f.update(_seed={"is": "pickle", "bytes": "x"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_and_sealed_again_it_is_refused_in_words(saved, tmp_path, change, flag_off):
    shutil.copy(saved / "model.safetensors", tmp_path)
    description = read_description(tmp_path / "model.safetensors")
    content = description["content"]
    items = content["items"]
    change = CHANGES[change]
    tables = (description, items if change is CHANGES["no params"] or change is CHANGES["no fitted"] else content)
    change(*tables, items["params"]["items"], items["fitted"]["items"])
    write_description(tmp_path / "model.safetensors", description)
    with pytest.raises(ModelFileError):
        load(tmp_path)


def test_a_file_cannot_ask_for_memory_that_it_does_not_fill(saved, tmp_path, flag_off):
    shutil.copy(saved / "model.safetensors", tmp_path)
    path = tmp_path / "model.safetensors"
    description = read_description(path)
    many = {"is": "strings", "items": ["a" * 100_000] + ["b"] * 10_000, "shape": [10_001], "kind": "U"}
    description["content"]["items"]["fitted"]["items"]["classes_"] = many
    write_description(path, description)
    tracemalloc.start()
    try:
        load(tmp_path)  # 10,001 strings of 100,000 places are 4 GB
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_a_model_that_would_take_all_memory_is_refused(tmp_path, flag_off):
    X = np.linspace(0.0, 1.0, 12)[:, None]
    settings = {"num_inducing": 3, "max_iter": 1, "random_state": 0, "verbose": False}
    DeepGPClassifier("dsvi", depth=1, likelihood="softmax", **settings).fit(X, np.arange(12) % 3).save(tmp_path)
    path = tmp_path / "model.safetensors"
    description = read_description(path)
    fields = description["content"]["items"]["fitted"]["items"]["posterior_"]["fields"]
    likelihood = fields["model"]["fields"]["likelihood"]["fields"]
    for place, name, wrong in ((likelihood, "num_points", 10**9), (likelihood, "num_points", 2**20)):
        right, place[name] = place[name], wrong
        write_description(path, description)
        with pytest.raises(ModelFileError, match=r"num_points must be at most|would take arrays of [\d,]+ numbers"):
            load(tmp_path)
        place[name] = right
    write_description(path, description)
    load(tmp_path)


def test_arrays_that_do_not_fit_together_are_refused(saved, tmp_path, flag_off):
    from safetensors.numpy import load as load_arrays

    shutil.copy(saved / "model.safetensors", tmp_path)
    path = tmp_path / "model.safetensors"
    description, arrays = read_description(path), load_arrays(path.read_bytes())
    name = "content.fitted.posterior_.alpha"
    for wrong in (arrays[name][:-1], arrays[name].astype(np.int32), arrays[name].ravel()):
        write_description(path, description, arrays | {name: wrong}, summaries=True)
        with pytest.raises(ModelFileError):
            load(tmp_path)
    write_description(path, description, arrays, summaries=True)
    load(tmp_path)


def test_an_array_whose_checksum_is_wrong_is_named(saved, tmp_path, flag_off):
    from safetensors.numpy import load as load_arrays

    shutil.copy(saved / "model.safetensors", tmp_path)
    path = tmp_path / "model.safetensors"
    arrays = load_arrays(path.read_bytes())
    name = "content.fitted.posterior_.alpha"
    write_description(path, read_description(path), arrays | {name: arrays[name] + 1.0})
    with pytest.raises(ModelFileError, match=r"its array 'content\.fitted\.posterior_\.alpha' does not have the chec"):
        load(tmp_path)
