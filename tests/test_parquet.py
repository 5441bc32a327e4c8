"""Streams of Parquet files: the order of rows, what one pass finds, and sentences about bad files."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fathomgp.data import Moments, ParquetSource, Standardizer, convert_csv, generate_table
from fathomgp.data._shuffle import ShuffledOrder
from fathomgp.errors import DataError, SettingError

ROWS, GROUP = 1000, 50


@pytest.fixture
def table(rng):
    return pd.DataFrame({"a": rng.normal(size=ROWS), "b": 5.0 + rng.normal(size=ROWS), "y": np.arange(float(ROWS))})


@pytest.fixture
def trips(table, tmp_path):
    """Three files of several row groups; y is the number of the row."""
    directory = tmp_path / "trips"
    directory.mkdir()
    for number, (begin, end) in enumerate([(0, 420), (420, 700), (700, ROWS)]):
        table[begin:end].to_parquet(directory / f"{number}.parquet", row_group_size=GROUP, index=False)
    return directory


def rows_of(source, count, size=40, start=0, **settings):
    return source.feed(start=start, count=count, capacity=count, batch_size=size, **settings).index.ravel()


# --- the stream is a shuffle ------------------------------------------------------------------------------------------


def test_every_row_once_an_epoch_whatever_the_buffer(trips, seed):
    for buffer_rows in (60, 300, 10**6):
        source = ParquetSource(trips, "y", buffer_rows=buffer_rows)
        rows = rows_of(source, 50, seed=seed)
        assert np.array_equal(np.sort(rows[:ROWS]), np.arange(ROWS))
        assert np.array_equal(np.sort(rows[ROWS:]), np.arange(ROWS))
        assert not np.array_equal(rows[:ROWS], rows[ROWS:])


def test_rows_carry_their_own_values(trips, table, seed):
    feed = ParquetSource(trips, "y", buffer_rows=200).feed(start=3, count=4, capacity=4, batch_size=30, seed=seed)
    assert np.array_equal(feed.y[..., 0], feed.index.astype(np.float32))
    assert np.array_equal(feed.x, table[["a", "b"]].to_numpy(np.float32)[feed.index])


def test_a_stretch_is_the_same_from_wherever_it_is_reached(trips, seed):
    whole = rows_of(ParquetSource(trips, "y", buffer_rows=200), 60, seed=seed)
    source = ParquetSource(trips, "y", buffer_rows=200)
    for start in (0, 1, 2, 24, 25, 26, 7):  # forward, past the end of an epoch, and back
        assert np.array_equal(rows_of(source, 3, start=start, seed=seed), whole[40 * start : 40 * (start + 3)])


def test_seeds_differ(trips, seed):
    source = ParquetSource(trips, "y", buffer_rows=200)
    assert not np.array_equal(rows_of(source, 25, seed=seed), rows_of(source, 25, seed=seed + 1))


def test_ordered_rows_keep_their_order(trips):
    rows = rows_of(ParquetSource(trips, "y", buffer_rows=60), 30, ordered=True)
    assert np.array_equal(rows, np.arange(1200) % ROWS)


def test_several_batches_a_step(trips, seed):
    source = ParquetSource(trips, "y", buffer_rows=200)
    feed = source.feed(start=2, count=3, capacity=3, batch_size=10, batches_per_step=4, seed=seed)
    assert feed.x.shape == (3, 4, 10, 2)
    assert np.array_equal(feed.index.ravel(), rows_of(source, 3, start=2, size=40, seed=seed))
    batch = feed.batch(jnp.asarray(1))
    assert batch.weight.shape == (4, 10)
    assert float(batch.num_data) == ROWS


@pytest.mark.parametrize(("groups", "buffer_groups"), [(16, 3), (150, 24), (1500, 24)])
def test_place_in_the_stream_says_nothing_about_place_in_the_files(groups, buffer_groups, seed):
    sizes = np.full(groups, 100)
    order = ShuffledOrder(sizes, 100 * buffer_groups, (seed,))
    pools = [order.groups(0, pool) for pool in range(order.num_pools)]
    assert np.array_equal(np.sort(np.concatenate(pools)), np.arange(groups))
    number = np.repeat(np.arange(len(pools)), [len(pool) for pool in pools])
    assert abs(np.corrcoef(number, np.concatenate(pools))[0, 1]) < 0.02


def test_shards_share_the_rows_and_stay_unbiased(trips):
    source = ParquetSource(trips, "y", buffer_rows=200, shards=3)
    feed = source.feed(start=0, count=1, capacity=1, batch_size=30)
    # Row groups are dealt out to the shards, and each row counts for the size of its shard.
    owner = {row: g % 3 for g, span in enumerate(spans(source)) for row in span}
    assert [owner[row] for row in feed.index[0]] == [0] * 10 + [1] * 10 + [2] * 10
    sizes = [sum(len(span) for g, span in enumerate(spans(source)) if g % 3 == shard) for shard in range(3)]
    assert np.allclose(feed.weight, np.repeat(sizes, 10) * 3 / ROWS)
    with pytest.raises(SettingError, match=r"batch_size is 40, which 3 processes cannot share"):
        rows_of(source, 1)
    with pytest.raises(DataError, match=r"100 processes are to share 21 row groups"):
        rows_of(ParquetSource(trips, "y", shards=100), 1)


def spans(source):
    return [range(group.first, group.first + group.rows) for group in source._files.groups]


# --- one pass ---------------------------------------------------------------------------------------------------------


def test_moments_and_sample_are_those_of_the_rows(trips, table):
    source = ParquetSource(trips, "y")
    x, y = source.moments()
    direct = Moments.of(table[["a", "b"]].to_numpy())
    assert np.allclose(x.mean, direct.mean)
    assert np.allclose(x.M2, direct.M2)
    assert np.allclose(y.std, table["y"].std(ddof=0))
    sample_x, sample_y, observed = source.subset(100, seed=1)
    numbers = sample_y[:, 0].astype(int)
    assert len(set(numbers)) == 100
    assert observed.all()
    assert np.array_equal(sample_x, table[["a", "b"]].to_numpy(np.float32)[numbers])
    assert len(source.subset(10**6, seed=1)[0]) == ROWS


def test_standard_units(trips, table):
    source = ParquetSource(trips, "y")
    x, y = source.moments()
    scaled = source.standardized(Standardizer.from_moments(x), Standardizer.from_moments(y), np.float64)
    feed = scaled.feed(start=0, count=25, capacity=25, batch_size=40)
    assert np.allclose(feed.x.reshape(-1, 2).mean(axis=0), 0.0, atol=1e-5)
    assert np.allclose(feed.x.reshape(-1, 2).std(axis=0), 1.0, atol=1e-5)
    assert feed.batch(jnp.asarray(0)).x.dtype == np.float64
    assert scaled.fingerprint() != source.fingerprint()


def test_held_out_rows_never_appear(trips, table):
    source = ParquetSource(trips, "y", hold_out=0.2, seed=3)
    X, y = source.held_out()
    assert 100 < len(y) < 300
    assert source.num_data == ROWS - len(y)
    assert np.array_equal(X, table[["a", "b"]].to_numpy()[y.astype(int)])
    feed = source.feed(start=0, count=1, capacity=1, batch_size=source.num_data)
    assert not set(feed.y.ravel().astype(int)) & set(y.astype(int))
    assert len(set(feed.y.ravel())) == source.num_data


def test_rows_with_nan_are_counted_and_refused_or_skipped(trips, table):
    table.loc[[450, 460, 461], "b"] = [np.nan, np.inf, np.nan]
    table[420:700].to_parquet(trips / "1.parquet", row_group_size=GROUP, index=False)
    with pytest.raises(DataError, match=r"3 rows hold NaN or infinity, the first in column 'b' of 1.parquet in row 30"):
        ParquetSource(trips, "y").moments()
    source = ParquetSource(trips, "y", nan="skip")
    assert source.num_data == ROWS - 3
    feed = source.feed(start=0, count=1, capacity=1, batch_size=ROWS)
    assert np.array_equal(np.sort(feed.index.ravel()), np.arange(ROWS - 3))
    assert not {450.0, 460.0, 461.0} & set(feed.y.ravel())


# --- bad files --------------------------------------------------------------------------------------------------------


def test_a_misspelt_column_names_the_near_miss(trips):
    with pytest.raises(DataError, match=r"0.parquet has no target column 'yy': did you mean 'y'"):
        ParquetSource(trips, "yy")
    with pytest.raises(DataError, match=r"0.parquet has no column 'c': its columns are 'a', 'b', 'y'"):
        ParquetSource(trips, "y", inputs=["a", "c"])


def test_files_must_have_the_same_columns(trips, table):
    table.rename(columns={"b": "bb"}).to_parquet(trips / "3.parquet", index=False)
    with pytest.raises(DataError, match=r"3.parquet has no column 'b': 0.parquet has one, so the files differ"):
        ParquetSource(trips, "y")
    table.assign(c=1.0).to_parquet(trips / "3.parquet", index=False)
    with pytest.raises(DataError, match=r"3.parquet has other columns than 0.parquet \(also 'c'\)"):
        ParquetSource(trips, "y")
    assert ParquetSource(trips, "y", inputs=["a", "b"]).num_data == 2 * ROWS


def test_text_is_refused(trips, table):
    table.assign(b="x").to_parquet(trips / "3.parquet", index=False)
    with pytest.raises(DataError, match=r"Column 'b' of 3.parquet holds .*string"):
        ParquetSource(trips, "y")


def test_broken_files_are_named(trips, table):
    whole = (trips / "2.parquet").read_bytes()
    (trips / "2.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"2.parquet cannot be read as Parquet, it may be truncated"):
        ParquetSource(trips, "y")
    (trips / "2.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"2.parquet is an empty file"):
        ParquetSource(trips, "y")
    table[:0].to_parquet(trips / "2.parquet", index=False)
    with pytest.raises(DataError, match=r"2.parquet has columns but no rows"):
        ParquetSource(trips, "y")


def test_damage_inside_a_file_is_named_when_it_is_reached(trips):
    whole = bytearray((trips / "1.parquet").read_bytes())
    whole[4:400] = bytes(396)
    (trips / "1.parquet").write_bytes(bytes(whole))
    with pytest.raises(DataError, match=r"1.parquet cannot be read as Parquet"):
        ParquetSource(trips, "y").moments()


def test_a_constant_target_is_refused(trips, table):
    for file in trips.iterdir():
        frame = pd.read_parquet(file).assign(y=3.0)
        frame.to_parquet(file, index=False)
    with pytest.raises(DataError, match=r"The target 'y' is constant over all 1,000 rows"):
        ParquetSource(trips, "y").moments()


def test_no_files(tmp_path):
    with pytest.raises(DataError, match=r"There is no Parquet file at"):
        ParquetSource(tmp_path / "nothing", "y")
    (tmp_path / "a.csv").write_text("a,y\n1,2\n")
    with pytest.raises(DataError, match=r"holds CSV files: convert them"):
        ParquetSource(tmp_path, "y")


def test_settings_are_checked(trips):
    with pytest.raises(SettingError, match=r"nan must be 'error' or 'skip'"):
        ParquetSource(trips, "y", nan="drop")
    with pytest.raises(SettingError, match=r"hold_out must be at least 0"):
        ParquetSource(trips, "y", hold_out=1.0)
    with pytest.raises(DataError, match=r"A stream of 1,000 rows is not held in memory"):
        ParquetSource(trips, "y").everything()


def test_the_fingerprint_sees_a_changed_value(trips, table):
    before = ParquetSource(trips, "y").fingerprint()
    assert ParquetSource(trips, "y").fingerprint() == before
    table.loc[500, "a"] += 1.0
    table[420:700].to_parquet(trips / "1.parquet", row_group_size=GROUP, index=False)
    assert ParquetSource(trips, "y").fingerprint() != before


# --- generated tables and CSV -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "inputs", "target"), [("taxi", 9, "duration"), ("collider", 28, "label")])
def test_generated_tables_depend_on_the_seed_alone(name, inputs, target, tmp_path, seed, monkeypatch):
    monkeypatch.setattr("fathomgp.data._generate.GROUP_ROWS", 500)
    monkeypatch.setattr("fathomgp.data._generate._GROUPS_A_FILE", 2)
    generate_table(name, 2300, tmp_path / "one", seed=seed, workers=1)
    generate_table(name, 2300, tmp_path / "two", seed=seed, workers=3)
    generate_table(name, 2600, tmp_path / "more", seed=seed)
    generate_table(name, 2300, tmp_path / "other", seed=seed + 1)
    one, two, more, other = (pd.read_parquet(tmp_path / part) for part in ("one", "two", "more", "other"))
    assert one.shape == (2300, inputs + 1)
    assert one.columns[-1] == target
    assert (one.dtypes == np.float32).all()
    pd.testing.assert_frame_equal(one, two)
    pd.testing.assert_frame_equal(one, more[:2300])
    assert not one.equals(other)
    assert sorted(file.name for file in (tmp_path / "one").iterdir()) == [f"{name}-0000{n}.parquet" for n in range(3)]
    with pytest.raises(DataError, match=r"is not an empty directory"):
        generate_table(name, 10, tmp_path / "one")


def test_journeys_have_the_noise_that_they_claim(rng):
    from fathomgp.data._journeys import JOURNEY_INPUTS, JOURNEY_NOISE, draw_journeys, journey_seconds

    table = draw_journeys(20_000, rng)
    X = np.column_stack([table[name] for name in JOURNEY_INPUTS])
    error = table["duration"] - journey_seconds(X)
    assert abs(np.sqrt(np.mean(error**2)) / JOURNEY_NOISE - 1.0) < 0.05
    assert abs(np.mean(error)) < 4.0 * JOURNEY_NOISE / np.sqrt(20_000)
    assert table["duration"].std() > 10.0 * JOURNEY_NOISE


def test_the_best_auc_is_that_of_the_true_probability(rng):
    from sklearn.metrics import roc_auc_score

    from fathomgp.data._collider import COLLIDER_INPUTS, best_collider_auc, draw_collisions, signal_probability

    table = draw_collisions(40_000, rng)
    p = signal_probability(np.column_stack([table[name] for name in COLLIDER_INPUTS]))
    assert abs(roc_auc_score(table["label"], p) - best_collider_auc(40_000)) < 0.01
    assert 0.3 < table["label"].mean() < 0.7


def test_unknown_generator(tmp_path):
    with pytest.raises(SettingError, match=r"There is no generator 'taxis': did you mean 'taxi'"):
        generate_table("taxis", 10, tmp_path / "out")


def test_csv_becomes_parquet(table, tmp_path, monkeypatch):
    monkeypatch.setattr("fathomgp.data._convert.GROUP_ROWS", 300)
    table.loc[5, "b"] = np.nan
    table.to_csv(tmp_path / "trips.csv", index=False)
    seen = []
    [path] = convert_csv(tmp_path / "trips.csv", tmp_path / "out", progress=seen.append)
    assert sum(seen) == (tmp_path / "trips.csv").stat().st_size
    assert pq.ParquetFile(path).num_row_groups == 4
    pd.testing.assert_frame_equal(pd.read_parquet(path), table.astype(np.float32))


def test_csv_with_text_is_refused_and_nothing_is_written(table, tmp_path):
    table["b"] = table["b"].astype(object)
    table.loc[7, "b"] = "x"
    table.to_csv(tmp_path / "trips.csv", index=False)
    with pytest.raises(DataError, match=r"Column 'b' of trips.csv holds text \('x' in line 9\)"):
        convert_csv(tmp_path / "trips.csv", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(DataError, match=r"There is no CSV file"):
        convert_csv(tmp_path / "nothing.csv", tmp_path / "elsewhere")


def test_booleans_and_whole_numbers_are_numbers(tmp_path):
    columns = {"a": np.arange(100), "b": np.arange(100) % 2 == 0, "y": np.arange(100, dtype=np.int8)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    feed = ParquetSource(tmp_path / "*.parquet", "y").feed(start=0, count=1, capacity=1, batch_size=100)
    assert np.array_equal(feed.x[0, :, 1], (feed.index[0] % 2 == 0).astype(np.float32))
