"""Tables at the door: what is accepted, and the sentence for everything that is not."""

import warnings

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import check_is_fitted

from fathomgp.data._tables import near_miss, read_inputs, read_table, read_targets
from fathomgp.errors import DataError, DataWarning, SettingError

NAMES = ("age", "income", "height")
VALUES = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def frames(names=NAMES):
    columns = dict(zip(names, VALUES.T, strict=True))
    return {"pandas": pd.DataFrame(columns), "polars": pl.DataFrame(columns), "pyarrow": pa.table(columns)}


class TestAccepted:
    @pytest.mark.parametrize("make", [np.asarray, np.ndarray.tolist, np.asfortranarray, pd.DataFrame])
    def test_unnamed_tables(self, make):
        X, names = read_inputs(make(VALUES))
        np.testing.assert_array_equal(X, VALUES)
        assert X.dtype == np.float64
        assert names is None

    @pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
    def test_frames_keep_their_names(self, library):
        X, names = read_inputs(frames()[library], feature_names=NAMES)
        np.testing.assert_array_equal(X, VALUES)
        assert names == NAMES

    @pytest.mark.parametrize("kind", ["bool", "int8", "uint8", "int64", "float16", "float32", "object"])
    def test_numeric_dtypes(self, kind):
        X, _ = read_inputs(np.array([[0, 1], [1, 0]]).astype(kind))
        assert X.tolist() == [[0.0, 1.0], [1.0, 0.0]]

    def test_nullable_and_boolean_columns(self):
        frame = pd.DataFrame(
            {"a": pd.array([1, 2], "Int64"), "b": pd.array([True, False], "boolean"), "c": [True, False]}
        )
        assert read_inputs(frame)[0].tolist() == [[1.0, 1.0, 1.0], [2.0, 0.0, 0.0]]

    @pytest.mark.filterwarnings("ignore:.*look alike")
    @given(arrays(np.float64, st.tuples(st.integers(2, 6), st.integers(1, 4)), elements=st.floats(-1e300, 1e300)))
    def test_any_finite_array_passes_unchanged(self, X):
        np.testing.assert_array_equal(read_inputs(X)[0], X)
        np.testing.assert_array_equal(read_inputs(pl.DataFrame(X))[0], X)

    def test_one_row_is_enough_to_predict(self):
        assert read_inputs(VALUES[:1], num_features=3)[0].shape == (1, 3)

    def test_arrays_are_taken_by_position(self):
        assert read_inputs(VALUES, feature_names=NAMES, num_features=3)[1] is None


BAD_INPUTS = {
    "vector": (np.arange(3.0), r"shape \(3,\).*Reshape your data with X.reshape\(-1, 1\)"),
    "series": (pd.Series([1.0, 2.0]), r"Reshape your data with X.reshape\(-1, 1\)"),
    "cube": (np.zeros((2, 3, 4)), r"shape \(2, 3, 4\).*reshape\(len\(X\), -1\)"),
    "scalar": (3.0, r"single value \(3.0\).*pass a table"),
    "ragged": ([[1.0, 2.0], [3.0]], "differ in length"),
    "one row": (VALUES[:1], "X has 1 sample, but at least 2 are needed"),
    "no rows": (np.zeros((0, 3)), "X has 0 samples"),
    "no columns": (np.zeros((12, 0)), r"0 feature\(s\) \(shape=\(12, 0\)\) while a minimum of 1 is required"),
    "nan": (np.array([[1.0, 2.0], [3.0, np.nan]]), r"Column 1 of X contains NaN \(first in row 1\): fill"),
    "masked": (np.ma.masked_invalid([[1.0, 2.0], [3.0, np.nan]]), "Column 1 of X contains NaN"),
    "none in a list": ([[1.0, None], [2.0, 3.0]], r"Column 1 of X contains NaN \(first in row 0\)"),
    "inf": (pd.DataFrame({"a": [1.0, -np.inf]}), r"Column 'a' of X contains inf \(first in row 1\)"),
    "null": (pl.DataFrame({"a": [1, None]}), r"Column 'a' of X contains NaN \(first in row 1\)"),
    "nullable": (pd.DataFrame({"a": pd.array([None, 1], "Int64")}), "Column 'a' of X contains NaN"),
    "complex": (VALUES + 1j, "Complex data not supported"),
    "text array": (np.array([["a", "1"], ["b", "2"]]), r"Column 0 of X holds text \('a' in row 0\): encode it"),
    "text in a list": ([[1.0, 2.0], [3.0, "x"]], r"Column 1 of X holds text \('x' in row 1\)"),
    "text of digits": (pd.DataFrame({"a": ["1", "2"]}), r"Column 'a' of X holds text \('1' in row 0\)"),
    "polars text": (pl.DataFrame({"a": [1, 2], "b": ["u", "v"]}), r"Column 'b' of X holds text \('u' in row 0\)"),
    "pyarrow text": (pa.table({"b": ["u", "v"]}), "Column 'b' of X holds text"),
    "category": (pd.DataFrame({"a": pd.Categorical(["u", "v"])}), "Column 'a' of X holds text"),
    "objects": (
        pd.DataFrame({"a": np.array([1, 2], object)}),
        r"Column 'a' of X has the dtype object.*astype\(float\)",
    ),
    "a dict": (np.array([[{}, 1], [2, 3]], object), "Column 0 of X holds something that is no number"),
    "dates": (pd.DataFrame({"when": pd.to_datetime(["2020-01-01", "2020-01-02"])}), "Column 'when' of X holds dates"),
    "mixed names": (pd.DataFrame({"a": [1.0, 2.0], 3: [1.0, 2.0]}), "named by text and some are not"),
    "same name twice": (pd.DataFrame(VALUES, columns=["a", "b", "a"]), "several columns named 'a'"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs_are_refused_with_a_sentence(case):
    X, message = BAD_INPUTS[case]
    with pytest.raises(DataError, match=message) as caught:
        read_inputs(X)
    assert "\n" not in str(caught.value)


def test_sparse_matrices_are_refused():
    from scipy import sparse

    for matrix in (sparse.csr_array(VALUES), sparse.coo_matrix(VALUES)):
        with pytest.raises(DataError, match=r"sparse matrix.*X\.toarray\(\)"):
            read_inputs(matrix)


class TestColumnsOfThePrediction:
    @pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
    def test_unknown_column_is_named_with_the_near_miss(self, library):
        with pytest.raises(DataError, match=r"unknown 'incom'; missing 'income'.*'incom': did you mean 'income'\?"):
            read_inputs(frames(("age", "incom", "height"))[library], feature_names=NAMES)

    def test_missing_and_extra_columns(self):
        frame = frames()["pandas"]
        with pytest.raises(DataError, match=r"\(missing 'height'\): the model needs 'age', 'income', 'height'"):
            read_inputs(frame[["age", "income"]], feature_names=NAMES)
        with pytest.raises(DataError, match=r"\(unknown 'zip'\)"):
            read_inputs(frame.assign(zip=1.0), feature_names=NAMES)

    def test_another_order(self):
        with pytest.raises(DataError, match="another order than at the fit: put them into the order 'age', 'income'"):
            read_inputs(frames()["pandas"][["income", "age", "height"]], feature_names=NAMES)

    @pytest.mark.parametrize("known", [{"num_features": 4}, {"feature_names": ["a", "b", "c", "d"]}])
    def test_another_number_of_columns(self, known):
        with pytest.raises(DataError, match="X has 3 features, but the model is expecting 4 features as input"):
            read_inputs(VALUES, **known)


class MeanRegressor(RegressorMixin, BaseEstimator):
    """The least estimator that reads its data through our door."""

    def fit(self, X, y):
        X, _ = read_inputs(X, estimator=self, reset=True)
        self.targets_ = read_targets(y, num_rows=len(X))
        return self

    def predict(self, X):
        check_is_fitted(self)
        X, _ = read_inputs(X, estimator=self, reset=False)
        mean = np.repeat(self.targets_.Y.mean(axis=0)[None, :], len(X), axis=0)
        return mean[:, 0] if self.targets_.squeeze else mean

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        tags.target_tags.multi_output = True
        tags.target_tags.required = True
        return tags


@parametrize_with_checks([MeanRegressor()])
def test_scikit_learn_accepts_the_messages(estimator, check):
    check(estimator)


class TestEstimator:
    def test_scikit_learns_attributes_are_kept(self):
        estimator = MeanRegressor().fit(frames()["polars"], [1.0, 2.0])
        assert estimator.n_features_in_ == 3
        assert estimator.feature_names_in_.tolist() == list(NAMES)

    def test_misspelt_column(self):
        estimator = MeanRegressor().fit(frames()["pandas"], [1.0, 2.0])
        with pytest.raises(DataError, match=r"unseen at fit time:\n- incom\n(.|\n)*'incom': did you mean 'income'\?"):
            estimator.predict(frames(("age", "incom", "height"))["pandas"])


class TestTargets:
    @pytest.mark.parametrize(
        "y",
        [[1.0, 2.0], (1, 2), np.array([1, 2]), pd.Series([1, 2]), pl.Series([1, 2]), pa.array([1, 2])],
        ids=["list", "tuple", "numpy", "pandas", "polars", "pyarrow"],
    )
    def test_one_dimension(self, y):
        Y, observed, squeeze, names = read_targets(y, num_rows=2)
        assert Y.tolist() == [[1.0], [2.0]]
        assert observed.all()
        assert squeeze
        assert names is None

    @pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
    def test_frames(self, library):
        Y, _, squeeze, names = read_targets(frames()[library])
        np.testing.assert_array_equal(Y, VALUES)
        assert not squeeze
        assert names == NAMES

    def test_series_keep_their_name(self):
        assert read_targets(pd.Series([1.0, 2.0], name="price")).names == ("price",)

    def test_missing_values_are_masked(self):
        y = np.array([[1.0, np.nan], [np.nan, np.nan], [3.0, 4.0], [5.0, 6.0]])
        Y, observed, _, _ = read_targets(y, missing="mask")
        assert observed.tolist() == [[True, False], [False, False], [True, True], [True, True]]
        assert Y.tolist() == [[1.0, 0.0], [0.0, 0.0], [3.0, 4.0], [5.0, 6.0]]

    def test_missing_value_in_a_list(self):
        assert read_targets([1.0, None, 2.0], missing="mask").observed[:, 0].tolist() == [True, False, True]

    @pytest.mark.parametrize(
        ("y", "message"),
        [
            (None, "requires y to be passed, but the target y is None"),
            ([1.0, np.nan], r"y contains NaN \(first in row 1\): drop such rows, or pass missing='mask'"),
            (pd.DataFrame({"a": [1.0, 2.0], "b": [np.nan, 2.0]}), r"Column 'b' of y contains NaN \(first in row 0\)"),
            ([1.0, np.inf], r"y contains inf \(first in row 1\)"),
            (["a", "b"], r"y holds text \('a' in row 0\)"),
            (np.array([{}, 1.0], object), "y holds something that is no number"),
            (np.array([1j, 1.0]), "Complex data not supported: y"),
            (np.zeros((2, 2, 2)), r"y has the shape \(2, 2, 2\)"),
            (np.zeros((2, 0)), r"y has 0 feature\(s\)"),
            ([1.0, 2.0, 3.0], "X has 2 rows but y has 3: give one target per row"),
        ],
    )
    def test_bad_targets(self, y, message):
        with pytest.raises(DataError, match=message):
            read_targets(y, num_rows=2)

    def test_infinity_is_refused_even_with_a_mask(self):
        with pytest.raises(DataError, match="y contains inf"):
            read_targets([1.0, np.nan, -np.inf], missing="mask")

    def test_a_target_that_was_never_measured(self):
        y = pd.DataFrame({"a": [1.0, 2.0], "b": [np.nan, np.nan]})
        with pytest.raises(DataError, match="Column 'b' of y has no measured value: drop this target"):
            read_targets(y, missing="mask")

    def test_unknown_option(self):
        with pytest.raises(SettingError, match="missing must be 'error' or 'mask', but it is 'drop'"):
            read_targets([1.0, 2.0], missing="drop")

    def test_constant_target_warns_and_passes(self):
        with pytest.warns(DataWarning, match=r"y is constant \(3\)"):
            assert read_targets([3.0, 3.0]).Y.shape == (2, 1)
        with pytest.warns(DataWarning, match=r"Column 1 of y is constant"):
            read_targets([[1.0, 3.0], [2.0, np.nan], [3.0, 3.0]], missing="mask")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read_targets([1, 1], kind="class")


class TestFiles:
    @pytest.fixture
    def frame(self):
        return pd.DataFrame({"age": [1.0, 2.0], "income": [0.1, 1 / 3], "price": [5.0, 6.0]})

    @pytest.mark.parametrize("suffix", [".csv", ".parquet", ".CSV"])
    def test_round_trip(self, frame, tmp_path, suffix):
        path = tmp_path / f"data{suffix}"
        frame.to_parquet(path) if suffix == ".parquet" else frame.to_csv(path, index=False)
        X, y = read_table(path, target="price")
        pd.testing.assert_frame_equal(X.reset_index(drop=True), frame[["age", "income"]], check_exact=True)
        pd.testing.assert_series_equal(y.reset_index(drop=True), frame["price"])
        assert list(read_table(str(path), target=["price", "age"])[1].columns) == ["price", "age"]
        assert read_table(path, target=None)[1] is None

    @pytest.mark.parametrize(
        ("file", "content", "message"),
        [
            ("data.csv", b"", "data.csv is empty"),
            ("data.csv", b"\n\n", "data.csv is empty"),
            ("data.csv", b"age,price\n", "data.csv has column names but no rows"),
            ("data.csv", b"age,pryce\n1,2\n", r"data.csv has no target column 'price': did you mean 'pryce'\?"),
            ("data.csv", b"a,b\n1,2\n", "no target column 'price': its columns are 'a', 'b'"),
            ("data.csv", b"price\n1\n", "no column beside the target"),
            ("data.csv", b"city,price\nRome,1\nOslo,2\n", r"Column 'city' of data.csv holds text \('Rome' in line 2\)"),
            ("data.csv", b"a,price\n1,2\n1,2,3,4\n", r"Line 3 of data.csv has 4 fields"),
            ("data.csv", b"a,price\n\xff\xfe,2\n", "data.csv is not in UTF-8"),
            ("data.parquet", b"not parquet at all", r"data.parquet cannot be read \("),
            ("data.xlsx", b"x", "unknown type '.xlsx': use .csv or .parquet"),
        ],
    )
    def test_bad_files(self, tmp_path, file, content, message):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            read_table(tmp_path / file, target="price")
        assert "\n" not in str(caught.value)

    def test_no_file(self, tmp_path):
        with pytest.raises(DataError, match=r"There is no file .*nowhere.csv: check the path"):
            read_table(tmp_path / "nowhere.csv", target="price")


def test_near_miss_ignores_case_and_keeps_silent_when_nothing_is_close():
    assert near_miss("AGE", ["age", "income"]) == " did you mean 'age'?"
    assert near_miss("weight", ["age", "income"]) == ""
