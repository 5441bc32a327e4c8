import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp.errors import ModelFileError
from fathomgp.kernels import RBF, Linear
from fathomgp.persistence import bundle_exists, load_bundle, register, save_bundle


@pytest.fixture
def content(key):
    return {
        "kernel": RBF(lengthscale=jnp.array([1.0, 2.0]), active_dims=(0, 2)) + Linear(),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "mask": np.array([True, False]),
        "empty": np.zeros((0, 3)),
        "key": key,
        "names": np.array(["a", "b"], dtype=object),
        "numbers": [1, 2.5, float("inf"), None, True, "text"],
        "pair": (1, (2.0,)),
    }


def test_round_trip_is_exact(tmp_path, content):
    save_bundle(tmp_path / "model", "model", content)
    assert bundle_exists(tmp_path / "model", "model")
    loaded = load_bundle(tmp_path / "model", "model")
    assert eqx.tree_equal(loaded["kernel"], content["kernel"], typematch=True)
    for name in ("array", "mask", "empty", "names"):
        assert loaded[name].dtype == content[name].dtype
        assert np.array_equal(loaded[name], content[name])
    assert np.array_equal(jax.random.key_data(loaded["key"]), jax.random.key_data(content["key"]))
    assert loaded["numbers"] == content["numbers"]
    assert loaded["pair"] == content["pair"]


def test_nan_survives(tmp_path):
    save_bundle(tmp_path, "model", {"x": float("nan"), "y": np.array([np.nan, -0.0])})
    loaded = load_bundle(tmp_path, "model")
    assert np.isnan(loaded["x"])
    assert loaded["y"].tobytes() == np.array([np.nan, -0.0]).tobytes()


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path, content):
    save_bundle(tmp_path, "model", content)
    save_bundle(tmp_path, "model", {"array": np.ones(3)})
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
    assert np.array_equal(load_bundle(tmp_path, "model")["array"], np.ones(3))


def test_a_failed_save_leaves_the_old_bundle(tmp_path, content):
    save_bundle(tmp_path, "model", content)
    with pytest.raises(ModelFileError, match=r"content\.odd is a builtins\.complex, which cannot be saved"):
        save_bundle(tmp_path, "model", {"odd": 1j})
    assert load_bundle(tmp_path, "model")["numbers"] == content["numbers"]


class Mine(eqx.Module):
    size: int = eqx.field(static=True)


def test_foreign_classes_must_be_registered(tmp_path):
    with pytest.raises(ModelFileError, match=r"register it with fathomgp\.persistence\.register"):
        save_bundle(tmp_path, "model", Mine(3))
    register(Mine)
    save_bundle(tmp_path, "model", Mine(3))
    assert load_bundle(tmp_path, "model") == Mine(3)


def test_a_file_cannot_name_an_arbitrary_class(tmp_path):
    save_bundle(tmp_path, "model", {"kernel": RBF()})
    path = tmp_path / "model.json"
    from fathomgp import persistence

    body = json.loads(path.read_text())
    body["content"]["items"]["kernel"]["class"] = "os.system"
    body.pop("seal")
    path.write_bytes(persistence._seal(body))
    with pytest.raises(ModelFileError, match=r"'os\.system', which is not registered"):
        load_bundle(tmp_path, "model")


def test_missing_foreign_and_newer_files_are_told_apart(tmp_path):
    with pytest.raises(ModelFileError, match="does not exist"):
        load_bundle(tmp_path, "model")
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(ModelFileError, match="is not a fathomgp file"):
        load_bundle(tmp_path, "model")
    (tmp_path / "model.json").write_bytes(b"\x80\x04cos\nsystem")
    with pytest.raises(ModelFileError, match="it is not JSON"):
        load_bundle(tmp_path, "model")
    (tmp_path / "model.json").write_text('{"magic": "fathomgp", "format": 99}')
    with pytest.raises(ModelFileError, match=r"has format 99, but fathomgp .* upgrade fathomgp"):
        load_bundle(tmp_path, "model")


def test_lost_arrays_are_named(tmp_path, content):
    save_bundle(tmp_path, "model", content)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(ModelFileError, match="copy the whole directory"):
        load_bundle(tmp_path, "model")


def test_two_hundred_damaged_files_are_all_refused(tmp_path, content, rng):
    save_bundle(tmp_path, "model", content)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    paths = sorted(files)
    for trial in range(200):
        victim = paths[trial % 2]
        victim.write_bytes(damaged(files[victim], rng))
        with pytest.raises(ModelFileError):
            load_bundle(tmp_path, "model")
        victim.write_bytes(files[victim])
    load_bundle(tmp_path, "model")


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Truncated, with a flipped bit, or with bytes inserted, removed or overwritten."""
    at = int(rng.integers(len(data)))
    match int(rng.integers(5)):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]
        case 2:
            return data[:at] + rng.bytes(3) + data[at:]
        case 3:
            return data[:at] + data[at + 1 :]
        case _:
            noise = rng.bytes(16)
            return data[:at] + noise + data[at + 16 :] if data[at : at + 16] != noise else data[:at]
