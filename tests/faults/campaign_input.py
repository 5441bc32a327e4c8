# ruff: noqa: E501 (a table of odd values)
"""Settings and data that nobody should pass, to the constructors, fits and questions of the public classes.

Whatever is passed, a call ends well or with one of fathomgp's own errors. Fits stop where the work would begin.
"""

import datetime
import decimal
import fractions
import inspect
import os
import pathlib
import resource
import sys
import tempfile
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pandas as pd
from outcomes import Tally, ending

import fathomgp
from fathomgp import inference, kernels, likelihoods
from fathomgp.estimators import GPLVM, DeepGPClassifier, DeepGPRegressor

NAME = "settings and data"
_PART = 500
#: A call that asks for more than this, JAX's own reserve included, is refused by the system and counts as raw.
_MEMORY = 24 << 30


class Enough(Exception):  # noqa: N818
    """The fit was reached: its settings and data were accepted."""


def reach(algorithm, model, source, *, max_iter=None, **settings):
    """In place of ``fit_model``: the plan is made, for that reads settings too."""
    algorithm.plan(source.num_data, max_iter)
    raise Enough


#: Values for any setting.
ODD = (
    None, True, False, 0, 1, 2, 3, -1, -(10**400), 10**400, 2**31, 2**63, 2**64, 1.5, 0.0, -0.0, 1e-300, 1e300,
    float("nan"), float("inf"), -float("inf"), 1j, "", " ", "x", "exact", "rbf", "gaussian", "auto", "\ud800", "0",
    "a" * 1000, b"x", [], [1], [[]], [None], ["rbf", "rbf"], [2, -2], (), (1, 2), {}, {"a": 1}, set(), range(3),
    object(),
    Ellipsis, NotImplemented, int, len, np.array([]), np.array(3), np.array([1, 2]), np.array(["a"]), np.int64(3),
    np.float32(2.0), np.float64("nan"), np.bool_(True), np.str_("exact"), decimal.Decimal(2), fractions.Fraction(1, 2),
    datetime.date(2020, 1, 1), pd.NA, pd.NaT, pd.Series([1.0]), pathlib.Path("x"), slice(3), memoryview(b"x"),
    "dsvi", "sgpr", "sghmc", "stride", "aep", "sequential", "meanfield", "decoupled", "mask", "double", "mixed", "single",
    "softmax", "bernoulli", "poisson", "student_t", "composition", "convolution", "injective", "salimbeni2017", -2.0, 4,
)  # fmt: skip


def odd_objects():
    """Values that must not be made at import, before JAX is configured."""
    return (
        jax.random.key(0), jax.random.PRNGKey(0), jax.numpy.ones(2), np.random.default_rng(0), np.random.RandomState(0),
        inference.Exact(), inference.DSVI(steps=3), kernels.RBF(), likelihoods.Gaussian(0.1), likelihoods.Softmax(3),
    )  # fmt: skip


# fmt: off
def odd_data():
    """Values for X or y, of five rows where they have rows."""
    import polars
    import pyarrow
    import scipy.sparse

    X = np.arange(10.0).reshape(5, 2)
    yield from (X, X[:, 0], X[:, :1], X.tolist(), X[:0], X[:, :0], X[:1], X[0, 0], X[None], X.astype("float16"))
    yield from (X.astype(">f8"), X.astype(int), X.astype(bool), X.astype(complex), X.astype(str), X.astype(object))
    yield from (X.astype("datetime64[s]"), X.astype("timedelta64[s]"), X[::-1, ::-1], np.asfortranarray(X), X * 1e300)
    yield from (X.astype("f4"), X.astype("u8") + 2**63, np.full((5, 2), 2.0**1023), X * np.nan, np.full((5, 2), np.inf))
    yield from (np.zeros((5, 2)), np.ma.masked_array(X, X > 5), np.ma.masked_all((5, 2)), np.zeros(5, [("a", "f8")]))
    yield from (np.zeros((5, 2), "V4"), np.array([b"a"] * 5), np.array([None] * 5), np.array([[1], [1, 2]], object))
    yield from ([[1, 2], [3]], [["a"], ["b", "c"]], [[["a"]]], ["a", "b", "a", "b", "a"], [1, "a", 2.0, None, True])
    yield from ([10**400, 1, 2, 3, 4], [[10**400, 1]] * 5, [[1.0, None]] * 5, [object()] * 5, [{}] * 5, [set()] * 5)
    yield from (["1", "2", "x", "3", "4"], [decimal.Decimal(1)] * 5, [fractions.Fraction(1, 2)] * 5, [1j] * 5)
    yield from ([b"a"] * 5, None, "", "abc", 3, {}, {"a": [1, 2]}, set(), iter([1, 2]), range(5), b"abc", object())
    yield from (memoryview(b"abcde"), [], [[]], [[], []], (1, 2, 3, 4, 5), [datetime.date(2020, 1, 1)] * 5, [np.nan] * 5)
    yield from ([True, False, True, False, True], ["=1+1", "b", "=1+1", "b", "a"], ["", "a", "", "a", ""], [np.inf] * 5)
    yield from (jax.random.key(0), jax.random.split(jax.random.key(0), 5), jax.numpy.ones((5, 2)))
    yield from ([jax.random.key(0)] * 5, scipy.sparse.eye_array(5), scipy.sparse.csr_matrix(X), np.arange(5) % 3)
    frame = pd.DataFrame(X, columns=["a", "b"])
    yield from (frame, frame.a, frame.astype(str), frame.astype(object), frame.astype("Int64"), frame.astype("Float32"))
    yield from (frame.set_axis(["a", "a"], axis=1), frame.set_axis([0, "a"], axis=1), frame.set_axis([1.5, 2.5], axis=1))
    yield from (frame.set_axis([[0, 1], [2, 3]], axis=1), frame.set_axis([None, "b"], axis=1), frame.rename(columns={"a": ""}))
    yield from (frame.astype("category"), frame.assign(b=pd.NA), frame.assign(b=pd.NaT), frame.assign(b="x"), frame[:0])
    yield from (frame.assign(b=pd.Timestamp("2020-01-01", tz="UTC")), frame.assign(b=pd.Timedelta("1s")), frame[[]], frame.T)
    yield from (frame.astype(pd.SparseDtype(float)), frame.assign(b=pd.interval_range(0, 5)), frame.assign(b=1j))
    yield from (frame.assign(b=pd.period_range("2020", periods=5)), frame.convert_dtypes(dtype_backend="pyarrow"))
    yield from (frame.a.astype("category"), frame.a.astype("string"), pd.Series([1, "a", None, 2.0, True]), pd.Index([1] * 5))
    yield from (pd.Series(["a", None, "b", "a", "b"]), pd.Series([True, None, False, True, True], dtype="boolean"))
    yield from (frame.set_index("a"), frame.set_index(["a", "b"]), frame.stack(), pd.Series([[1], [2], [1], [2], [3]]))
    table = polars.DataFrame({"a": [1.0, 2.0, 3.0, 4.0, 5.0], "b": [1, 2, 3, 4, None]})
    yield from (table, table.drop_nulls(), table["a"], table["b"], table.lazy(), table.with_columns(b=polars.lit("x")))
    for dtype in (polars.Int128, polars.Decimal(10, 2), polars.Float32, polars.Date, polars.Datetime, polars.Duration):
        yield table.with_columns(b=polars.col("a").cast(polars.Int64).cast(dtype))
        yield polars.Series("y", [1, 2, 1, 2, 1]).cast(dtype)
    yield from (table.select(polars.struct("a", "b")), table.with_columns(b=polars.concat_list("a", "a")), table.clear())
    yield from (table.with_columns(b=None), table.with_columns(b=polars.Series([10**30] * 5, dtype=polars.Int128)))
    yield from (polars.Series(["a", "b", None, "a", "b"], dtype=polars.Categorical), polars.Series([object()] * 5))
    arrow = pyarrow.table({"a": [1.0, 2, 3, 4, 5], "b": [1, 2, None, 4, 5]})
    yield from (arrow, arrow["a"], arrow.select(["a"]), arrow.slice(0, 0), arrow.append_column("c", [["x"] * 5]))
    yield from (arrow.append_column("c", [[[1]] * 5]), arrow.append_column("c", [[{"x": 1}] * 5]))
    yield from (pyarrow.array([1, 2, 1, 2, None]), arrow.append_column("c", pyarrow.array([decimal.Decimal(1)] * 5)))
    yield from (arrow.append_column("a", [[1] * 5]), arrow.append_column("c", pyarrow.array(["x"] * 5).dictionary_encode()))
    yield from (arrow.to_batches()[0], arrow.append_column("c", pyarrow.nulls(5)), arrow.append_column("c", [[b"x"] * 5]))
# fmt: on


ESTIMATORS = (DeepGPRegressor, DeepGPClassifier, GPLVM)
PIECES = tuple(
    piece
    for room in (inference, kernels, likelihoods)
    for _, piece in sorted(inspect.getmembers(room, inspect.isclass))
    if piece.__module__.startswith("fathomgp.")
    and not inspect.isabstract(piece)
    and not piece.__name__.startswith("Abstract")
)
#: Classes that a user builds: the rest are states and posteriors, made by the library from its own arrays.
PARTS = tuple(
    piece
    for piece in PIECES
    if issubclass(piece, inference.AbstractInference | kernels.AbstractKernel | likelihoods.AbstractLikelihood)
)


def parameters(cls, *, required=False):
    """Names of a constructor's parameters; a missing or unknown one is for Python to refuse."""
    found = inspect.signature(cls).parameters.values()
    named = [one for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return [one.name for one in named if not required or one.default is one.empty]


@st.composite
def cases(draw, data, odd):
    """A description of one call: a function without arguments, and words."""
    kind = draw(st.sampled_from(("settings", "settings", "data", "data", "parts", "questions")))
    value = st.sampled_from(odd)
    if kind == "parts":
        part = draw(st.sampled_from(PARTS))
        optional = parameters(part)
        chosen = draw(st.dictionaries(st.sampled_from(optional), value, max_size=3)) if optional else {}
        chosen |= {name: draw(value) for name in parameters(part, required=True)}
        return kind, part, chosen, None, None
    if kind == "questions":
        question = draw(st.sampled_from(sorted(QUESTIONS)))
        return kind, question, draw(value), draw(st.sampled_from(range(len(data)))), draw(value)
    estimator = draw(st.sampled_from(ESTIMATORS))
    chosen = (
        draw(st.dictionaries(st.sampled_from(parameters(estimator)), value, max_size=3)) if kind == "settings" else {}
    )
    places = st.sampled_from(range(len(data)))
    X = draw(places) if kind == "data" and draw(st.booleans()) else None
    y = draw(places) if kind == "data" else None
    return kind, estimator, chosen, X, y


QUESTIONS = {
    "predict": lambda model, a, data, b: model.predict(data),
    "predict with cov": lambda model, a, data, b: model.predict(np.zeros((5, 2)), return_cov=a),
    "predict with std": lambda model, a, data, b: model.predict(data, return_std=a),
    "predict_distribution": lambda model, a, data, b: model.predict_distribution(data),
    "log_density": lambda model, a, data, b: model.log_density(np.zeros((5, 2)), data),
    "predict_quantiles": lambda model, a, data, b: model.predict_quantiles(np.zeros((5, 2)), a),
    "sample_y": lambda model, a, data, b: model.sample_y(np.zeros((5, 2)), 3 if type(a) is int and a > 9 else a, b),
    "score": lambda model, a, data, b: model.score(np.zeros((5, 2)), data),
    "quantile": lambda model, a, data, b: model.predict_distribution(np.zeros((5, 2))).quantile(a),
    "interval": lambda model, a, data, b: model.predict_distribution(np.zeros((5, 2))).interval(a),
    "cdf": lambda model, a, data, b: model.predict_distribution(np.zeros((5, 2))).cdf(data),
    "crps": lambda model, a, data, b: model.predict_distribution(np.zeros((5, 2))).crps(data),
    "answer's log_density": lambda model, a, data, b: model.predict_distribution(np.zeros((5, 2))).log_density(data),
}


def call_of(case, data, model):
    """The call that a case describes."""
    kind, what, chosen, X, y = case
    if kind == "parts":
        return lambda: DeepGPRegressor(**_setting_of(what(**chosen)), verbose=False).fit(_X, _y)
    if kind == "questions":
        return lambda: QUESTIONS[what](model, chosen, _fresh(data, X), y)
    X, y = _X if X is None else _fresh(data, X), (_y > 2 if y is None else _fresh(data, y))

    def fit():
        if what is not GPLVM:
            chosen.setdefault("verbose", False)
        what(**chosen).fit(X, y)

    return fit


_X, _y = np.random.default_rng(0).normal(size=(5, 2)), np.arange(5.0)


def _fresh(data, number):
    """Iterators are used up by one call."""
    return iter([1, 2]) if hasattr(data[number], "__next__") else data[number]


def _setting_of(part):
    names = {inference.AbstractInference: "method", kernels.AbstractKernel: "kernel"}
    return {next((name for kind, name in names.items() if isinstance(part, kind)), "likelihood"): part}


def run(budget, out):
    """Up to ``budget`` cases in all, those in the file included."""
    tally = Tally(NAME, out)
    data, odd = list(odd_data()), [*ODD, *odd_objects()]
    model = DeepGPRegressor("exact", max_iter=2, random_state=0, verbose=False).fit(_X, _y)
    here = pathlib.Path.cwd()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    with (
        tempfile.TemporaryDirectory() as place,
        mock.patch("fathomgp.estimators._base.fit_model", reach),
        mock.patch("fathomgp.estimators._gplvm.fit_model", reach),
    ):
        os.chdir(place)
        try:
            while tally.done < budget:
                _run_part(tally, min(_PART, budget - tally.done), data, odd, model)
                tally.write()
        finally:
            os.chdir(here)
    return tally.rows


def _run_part(tally, cases_here, data, odd, model):
    @hypothesis.seed(tally.done)
    @hypothesis.settings(
        max_examples=cases_here,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases(data, odd))
    def attempt(case):
        kind, said = ending(call_of(case, data, model), fine=(Enough,))
        words = f"{getattr(case[1], '__name__', case[1])} {case[2]!r:.300} {case[3]} {case[4]!r:.100}"
        tally.add(kind, f"{case[0]} {words}", said)

    attempt()


if __name__ == "__main__":
    print(fathomgp.__version__, run(int(sys.argv[1]), pathlib.Path(sys.argv[2]).absolute()))
