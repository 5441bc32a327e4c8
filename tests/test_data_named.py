"""Named datasets: the directory, the cache, the download, and the checksums that guard all three."""

import functools
import http.server
import pathlib
import sys
import threading

import numpy as np
import pytest

from fathomgp.data import _named as named
from fathomgp.data._catalogue import CATALOGUE, Entry, Home, parse_uci_folder
from fathomgp.data._named import array_checksum, cache_directory, fetch_dataset, list_datasets, load_dataset
from fathomgp.data._splits import standard_split
from fathomgp.errors import DataError

# Read at import: the tests below change the environment.
DOWNLOADABLE = sorted(name for name, entry in CATALOGUE.items() if entry.home.parse is not None)


@pytest.fixture
def nowhere(monkeypatch, tmp_path) -> pathlib.Path:
    """No dataset directory, and an empty cache."""
    monkeypatch.delenv("FATHOMGP_DATA", raising=False)
    monkeypatch.setenv("FATHOMGP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_uci_folder(folder: pathlib.Path, X, y, test_idx) -> str:
    """The files of the public home: targets last, numbers in full precision, indices as floats or integers."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savetxt(folder / "data.txt", np.column_stack([X, y]), fmt="%.17g")
    np.savetxt(folder / "index_features.txt", np.arange(X.shape[1]))
    np.savetxt(folder / "index_target.txt", [X.shape[1]], fmt="%d")
    for i, test in enumerate(test_idx):
        np.savetxt(folder / f"index_test_{i}.txt", test, fmt="%d")
        np.savetxt(folder / f"index_train_{i}.txt", np.setdiff1d(np.arange(len(X)), test), fmt="%d")
    return folder.as_uri()


@pytest.fixture
def toy(monkeypatch, nowhere, rng, tmp_path):
    """A made-up set in the catalogue, with its upstream files and its arrays."""
    test_idx = np.array([[7, 1], [0, 3], [4, 5]], np.int32)
    arrays = {"X": rng.standard_normal((8, 3)), "y": rng.standard_normal(8), "test_idx": test_idx}
    home = Home("nobody/nothing", "toy", functools.partial(parse_uci_folder, splits=3))
    entry = Entry("toy", 8, 3, "regression", "made up", home, array_checksum(arrays))
    monkeypatch.setitem(CATALOGUE, "toy", entry)
    address = write_uci_folder(tmp_path / "upstream" / "toy", **arrays)
    return arrays, address


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The test's directory over HTTP on this machine."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class TestFetch:
    def test_the_cache_then_serves_the_same_arrays(self, toy, nowhere, served):
        arrays, _ = toy
        path = fetch_dataset("toy", address=f"{served}/upstream/toy")
        assert path == nowhere / "toy.npz"
        assert [file.name for file in nowhere.iterdir()] == ["toy.npz"]
        dataset = load_dataset("toy")  # from the cache: the home does not exist
        np.testing.assert_array_equal(dataset.X, arrays["X"])
        np.testing.assert_array_equal(dataset.Y, arrays["y"][:, None])
        np.testing.assert_array_equal(dataset.test_idx, arrays["test_idx"])
        assert standard_split(dataset, 2)[1].tolist() == [4, 5]

    def test_wrong_data_are_refused_and_leave_nothing(self, toy, nowhere, tmp_path):
        arrays, address = toy
        write_uci_folder(tmp_path / "upstream" / "toy", arrays["X"], arrays["y"] + 1e-9, arrays["test_idx"])
        with pytest.raises(DataError, match=r"does not hold the published data of 'toy'.*SHA-256 differs"):
            fetch_dataset("toy", address=address)
        assert not nowhere.exists()

    def test_wrong_splits_are_refused(self, toy, tmp_path):
        arrays, address = toy
        write_uci_folder(tmp_path / "upstream" / "toy", arrays["X"], arrays["y"], arrays["test_idx"][::-1])
        with pytest.raises(DataError, match="SHA-256 differs"):
            fetch_dataset("toy", address=address)

    def test_files_of_another_format(self, toy, tmp_path):
        _, address = toy
        (tmp_path / "upstream" / "toy" / "data.txt").write_text("<html>not found</html>")
        with pytest.raises(DataError, match=r"does not hold 'toy' in the known format \(.*set FATHOMGP_DATA"):
            fetch_dataset("toy", address=address)

    def test_files_that_are_not_there(self, toy, served):
        with pytest.raises(DataError, match=r"'toy' cannot be downloaded from http.*404.*set FATHOMGP_DATA"):
            fetch_dataset("toy", address=f"{served}/elsewhere")

    def test_a_failed_write_leaves_nothing(self, toy, nowhere, monkeypatch):
        _, address = toy
        monkeypatch.setattr(named.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fetch_dataset("toy", address=address)
        assert list(nowhere.iterdir()) == []

    def test_a_set_without_automatic_download_says_where_it_lives(self, nowhere):
        with pytest.raises(
            DataError, match=r"'frey' cannot be downloaded automatically; it lives at https://.*frey.npz"
        ):
            load_dataset("frey")


class TestLoad:
    def test_unknown_name(self):
        with pytest.raises(DataError, match=r"There is no dataset 'bostn': did you mean 'boston'\?"):
            load_dataset("bostn")
        with pytest.raises(DataError, match="There is no dataset 'qqq': the names are boston, concrete"):
            fetch_dataset("qqq")

    def test_the_directory_comes_before_the_cache(self, toy, nowhere, tmp_path):
        _, address = toy
        fetch_dataset("toy", address=address)
        (tmp_path / "toy.npz").write_bytes(b"damaged")
        with pytest.raises(DataError, match=r"toy.npz is not a readable .npz archive"):
            load_dataset("toy", directory=tmp_path)

    def test_other_arrays_are_refused(self, toy, tmp_path):
        arrays, _ = toy
        np.savez(tmp_path / "toy.npz", **(arrays | {"X": arrays["X"] * 2.0}))
        with pytest.raises(DataError, match=r"does not hold the published data of 'toy'.*replace the file"):
            load_dataset("toy", directory=tmp_path)

    def test_pickles_are_refused(self, toy, tmp_path):
        np.savez(tmp_path / "toy.npz", X=np.array([{}], object))
        with pytest.raises(DataError, match=r"not a readable .npz archive"):
            load_dataset("toy", directory=tmp_path)

    def test_list_says_what_is_here(self, toy, tmp_path):
        arrays, _ = toy
        assert not any(row.local for row in list_datasets())
        np.savez(tmp_path / "toy.npz", **arrays)
        rows = {row.name: row for row in list_datasets(directory=tmp_path)}
        assert [name for name, row in rows.items() if row.local] == ["toy"]
        assert rows["yacht"][1:4] == (308, 6, "regression")


class TestCacheDirectory:
    def test_environment(self, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", "some")
        monkeypatch.delenv("FATHOMGP_CACHE", raising=False)
        assert cache_directory() == pathlib.Path("some/fathomgp")
        monkeypatch.setenv("FATHOMGP_CACHE", "mine")
        assert cache_directory() == pathlib.Path("mine")

    @pytest.mark.parametrize(
        ("platform", "place"),
        [("linux", ".cache/fathomgp"), ("darwin", "Library/Caches/fathomgp"), ("win32", "AppData/Local/fathomgp")],
    )
    def test_platforms(self, monkeypatch, platform, place):
        for name in ("FATHOMGP_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "platform", platform)
        assert cache_directory() == pathlib.Path.home() / place


def test_the_checksum_ignores_layout_but_not_values(rng):
    X = rng.standard_normal((5, 3))
    assert array_checksum({"X": X}) == array_checksum({"X": np.asfortranarray(X)})
    assert array_checksum({"X": X}) == array_checksum({"X": X.astype(">f8"), "other": X})
    assert array_checksum({"X": X}) != array_checksum({"X": X.T})
    assert array_checksum({"X": X}) != array_checksum({"X": X.astype(np.float32)})


def test_the_catalogue_is_complete():
    assert len(CATALOGUE) == 26
    assert all(len(entry.checksum) == 64 for entry in CATALOGUE.values())


@pytest.mark.data
@pytest.mark.parametrize("name", list(CATALOGUE))
def test_real_sets(name):
    """Loading verifies the recorded checksum; sizes are those of the catalogue."""
    entry, dataset = CATALOGUE[name], load_dataset(name)
    assert dataset.X.shape == (entry.num_rows, entry.num_features)
    if dataset.target_kind == "none":
        assert dataset.Y is None
    else:
        assert dataset.Y.shape[0] == entry.num_rows
    if dataset.target_kind == "class":
        assert len(np.unique(dataset.Y)) == int(entry.task.split()[0])
        assert dataset.Y.min() == 0.0
    if dataset.test_idx is not None:
        train, test = standard_split(dataset, len(dataset.test_idx) - 1)
        assert len(train) + len(test) == entry.num_rows


def write_upstream(name: str, folder: pathlib.Path) -> str:
    """The real set in the format of its public home, which is out of reach for a test."""
    dataset = load_dataset(name)
    arguments = CATALOGUE[name].home.parse.keywords
    if "splits" in arguments:
        return write_uci_folder(folder, dataset.X, dataset.Y[:, 0], dataset.test_idx)
    lines = [",".join(f"{value:.17g}" for value in row) for row in dataset.X]
    if "labels" in arguments:
        labels = [arguments["labels"][int(code)] for code in dataset.Y[:, 0]]
        lines = [f"{line},{label}" for line, label in zip(lines, labels, strict=True)]
    else:
        values = zip(lines, dataset.Y[:, 0], strict=True)
        lines = ['"rownames","times","accel"', *(f"{i},{x},{y:.17g}" for i, (x, y) in enumerate(values))]
    folder.mkdir()
    (folder / arguments["file"]).write_text("\n".join(lines) + "\n")
    return folder.as_uri()


@pytest.mark.data
@pytest.mark.parametrize("name", [name for name in DOWNLOADABLE if name not in ("protein", "naval", "power", "kin8nm")])
def test_download_gives_the_recorded_arrays(name, monkeypatch, tmp_path):
    address = write_upstream(name, tmp_path / "upstream")
    monkeypatch.setenv("FATHOMGP_CACHE", str(tmp_path / "cache"))
    expected = load_dataset(name)
    fetch_dataset(name, address=address)
    found = load_dataset(name, directory=tmp_path / "cache")
    np.testing.assert_array_equal(found.X, expected.X)
    np.testing.assert_array_equal(found.Y, expected.Y)
