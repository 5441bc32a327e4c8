import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fathomgp import tags
from fathomgp.errors import ModelFileError, SettingError
from fathomgp.kernels import RBF, Linear
from fathomgp.persistence import _first_format, bundle_exists, load_bundle, register, save_bundle
from tampering import read_description, write_description


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


def test_names_with_full_stops_do_not_collide(tmp_path):
    save_bundle(tmp_path, "model", {"a.b": np.ones(2), "a": {"b": np.zeros(3)}})
    loaded = load_bundle(tmp_path, "model")
    assert loaded["a.b"].tolist() == [1.0, 1.0]
    assert loaded["a"]["b"].tolist() == [0.0, 0.0, 0.0]


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path, content):
    save_bundle(tmp_path, "model", content)
    save_bundle(tmp_path, "model", {"array": np.ones(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert np.array_equal(load_bundle(tmp_path, "model")["array"], np.ones(3))


def test_any_reader_of_safetensors_finds_the_arrays(tmp_path, content):
    from safetensors.numpy import load_file

    path = save_bundle(tmp_path, "model", content)
    assert np.array_equal(load_file(path)["content.array"], content["array"])


def test_a_failed_save_leaves_the_old_bundle(tmp_path, content):
    save_bundle(tmp_path, "model", content)
    with pytest.raises(ModelFileError, match=r"content\.odd is a builtins\.complex, which cannot be saved"):
        save_bundle(tmp_path, "model", {"odd": 1j})
    assert load_bundle(tmp_path, "model")["numbers"] == content["numbers"]


class Mine(eqx.Module):
    size: int = eqx.field(static=True)
    colour: str = eqx.field(static=True, default="red")


def test_foreign_classes_must_be_registered(tmp_path):
    with pytest.raises(ModelFileError, match=r"register it with fathomgp\.persistence\.register"):
        save_bundle(tmp_path, "model", Mine(3))
    register("test/mine")(Mine)
    save_bundle(tmp_path, "model", Mine(3))
    assert load_bundle(tmp_path, "model") == Mine(3)
    assert read_description(tmp_path / "model.safetensors")["content"]["tag"] == "test/mine"
    with pytest.raises(SettingError, match=r"The tag 'kernel/rbf' belongs to .*RBF: choose another"):
        register("kernel/rbf")(Mine)


def test_a_missing_field_takes_its_default_and_one_too_many_is_named(tmp_path):
    register("test/mine")(Mine)
    path = save_bundle(tmp_path, "model", Mine(3, "blue"))
    description = read_description(path)
    fields = description["content"]["fields"]
    fields.pop("colour")
    write_description(path, description)
    assert load_bundle(tmp_path, "model") == Mine(3, "red")
    fields["weight"] = 7
    write_description(path, description)
    with pytest.raises(ModelFileError, match=r"'test/mine', has the unknown field 'weight': upgrade"):
        load_bundle(tmp_path, "model")
    fields.pop("weight")
    fields.pop("size")
    write_description(path, description)
    with pytest.raises(ModelFileError, match=r"'test/mine', lacks the field 'size'"):
        load_bundle(tmp_path, "model")


def test_every_tag_of_the_first_release_still_names_a_class():
    import fathomgp.estimators  # noqa: F401

    known = tags.known_tags()
    assert set(_first_format.TAGS.values()) <= set(known)
    assert all(dataclasses.is_dataclass(cls) for cls in known.values())


def concrete(cls):
    for child in cls.__subclasses__():
        yield from concrete(child)
        if child.__module__.startswith("fathomgp.") and not child.__name__.lstrip("_").startswith("Abstract"):
            yield child


def test_whatever_a_model_may_be_made_of_has_a_tag():
    from fathomgp.inference import AbstractInference, AbstractPosterior
    from fathomgp.kernels import AbstractKernel
    from fathomgp.likelihoods import AbstractLikelihood
    from fathomgp.means import AbstractMean

    for family in (AbstractInference, AbstractPosterior, AbstractKernel, AbstractLikelihood, AbstractMean):
        assert [cls for cls in concrete(family) if tags.tag_of(cls) is None and cls.__name__[0] != "_"] == []


def test_missing_foreign_and_newer_files_are_told_apart(tmp_path, content):
    with pytest.raises(ModelFileError, match="does not exist"):
        load_bundle(tmp_path, "model")
    path = tmp_path / "model.safetensors"
    path.write_text("{}")
    with pytest.raises(ModelFileError, match="is damaged or not a fathomgp file"):
        load_bundle(tmp_path, "model")
    path.write_bytes(b"\x04\x00\x00\x00\x00\x00\x00\x00cos\nsystem")
    with pytest.raises(ModelFileError, match="it is not JSON"):
        load_bundle(tmp_path, "model")
    path.write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(ModelFileError, match="is not a fathomgp file: it lacks the mark"):
        load_bundle(tmp_path, "model")
    save_bundle(tmp_path, "model", content)
    write_description(path, read_description(path) | {"format": 99})
    with pytest.raises(ModelFileError, match=r"has format 99, but fathomgp .* upgrade fathomgp"):
        load_bundle(tmp_path, "model")


def test_two_hundred_damaged_files_are_all_refused(tmp_path, content, rng):
    path = save_bundle(tmp_path, "model", content)
    whole = path.read_bytes()
    for _ in range(200):
        path.write_bytes(damaged(whole, rng))
        with pytest.raises(ModelFileError):
            load_bundle(tmp_path, "model")
    path.write_bytes(whole)
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


def test_an_online_gp_of_the_first_release_gets_a_root_of_its_inverse(rng):
    active = np.array([True, False, True, True])
    Q = np.zeros((4, 4))
    roots = rng.normal(size=(3, 3))
    Q[np.ix_(active, active)] = roots @ roots.T
    arrays = {"Q": Q, "w": np.zeros((4, 1))}
    fields = {"inverse": {"is": "jax", "at": "Q"}, "weights": {"is": "jax", "at": "w"}}
    _first_format._give_online_gp_a_root(fields, arrays)
    V = arrays[fields["root"]["at"]]
    assert np.allclose(V.T @ V, Q)
    assert not V[1].any()
    assert list(arrays) == ["Q"]
