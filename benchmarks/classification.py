"""DeepGPClassifier beside scikit-learn's GaussianProcessClassifier, on random 90/10 splits of seven small UCI sets.

scikit-learn learns an ARD RBF kernel on inputs standardised with the training rows (Laplace's approximation, one
against the rest for several classes); fathomgp runs with its defaults. Seconds are those of ``fit``, compilation
included.

    python benchmarks/classification.py [--datasets pima,sonar] [--splits 0,1] [--out results/classification.csv]

Rows already in the file are not run again. The last line says whether fathomgp holds what it promises: a mean test
log-likelihood of at least scikit-learn's less 0.02 nats on every set.
"""

import argparse
import time
import warnings

import numpy as np
import sklearn

import fathomgp
from fathomgp.bench import ResultFile
from fathomgp.data import load_dataset, random_split

TOLERANCE = 0.02
DATASETS = "pima,ionosphere,sonar,breast,glass,wine,new-thyroid"
COLUMNS = ("dataset", "split", "library", "n", "d", "classes", "loglik", "accuracy", "seconds", "version")
KEY = ("dataset", "split", "library")


def fit_fathomgp(X, y, X_test):
    estimator = fathomgp.DeepGPClassifier(random_state=0, verbose=False)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says when there are fewer rows than inducing points
        estimator.fit(X, y)
    seconds = time.perf_counter() - began
    return estimator.predict_proba(X_test), seconds


def fit_sklearn(X, y, X_test):
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    began = time.perf_counter()
    shift, scale = X.mean(axis=0), X.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    estimator = GaussianProcessClassifier(ConstantKernel() * RBF(np.ones(X.shape[1])), random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns when a parameter ends at a bound
        estimator.fit((X - shift) / scale, y)
    seconds = time.perf_counter() - began
    return estimator.predict_proba((X_test - shift) / scale), seconds


LIBRARIES = {"fathomgp": (fit_fathomgp, fathomgp.__version__), "sklearn": (fit_sklearn, sklearn.__version__)}


def run(datasets, splits, libraries, results):
    for name in datasets:
        dataset = load_dataset(name)
        X, y = dataset.X.astype(float), dataset.Y[:, 0].astype(int)
        for split in splits:
            for library in libraries if split % 2 == 0 else libraries[::-1]:
                key = {"dataset": name, "split": split, "library": library}
                if results.find(key) is None:
                    results.append(key | score(X, y, *random_split(len(X), 0.1, split), *LIBRARIES[library]))
                    row = results.rows[-1]
                    print(f"{name} {split} {library}: {row['loglik']} nats, {row['seconds']} s", flush=True)


def score(X, y, train, test, fit, version):
    probabilities, seconds = fit(X[train], y[train], X[test])
    loglik = np.log(probabilities[np.arange(len(test)), y[test]]).mean()
    accuracy = np.mean(probabilities.argmax(axis=1) == y[test])
    figures = {"loglik": round(loglik, 5), "accuracy": round(accuracy, 5), "seconds": round(seconds, 2)}
    return {"n": len(X), "d": X.shape[1], "classes": len(np.unique(y)), "version": version} | figures


def report(datasets, splits, results):
    print(f"\n{'dataset':12} {'fathomgp':>9} {'sklearn':>9} {'difference':>10} {'accuracy':>15} {'seconds':>13}")
    verdicts = []
    for name in datasets:
        ours, theirs = (
            [results.find({"dataset": name, "split": s, "library": lib}) for s in splits] for lib in LIBRARIES
        )
        means = {
            figure: [np.mean([float(row[figure]) for row in rows]) for rows in (ours, theirs)]
            for figure in ("loglik", "accuracy", "seconds")
        }
        difference = means["loglik"][0] - means["loglik"][1]
        accuracy, seconds = ("{:.3f} / {:.3f}".format(*means["accuracy"]), "{:.1f} / {:.1f}".format(*means["seconds"]))
        columns = (
            f"{means['loglik'][0]:9.3f} {means['loglik'][1]:9.3f} {difference:+10.3f} {accuracy:>15} {seconds:>13}"
        )
        verdicts.append(difference >= -TOLERANCE)
        print(f"{name:12} {columns}  {'holds' if verdicts[-1] else 'FAILS'}")
    held = "holds" if all(verdicts) else "FAILS"
    print(f"At least scikit-learn's mean log-likelihood less {TOLERANCE} nats on every set: {held}.")
    return all(verdicts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", default=DATASETS)
    parser.add_argument("--splits", default="0,1,2,3,4,5,6,7,8,9", help="seeds of the random splits")
    parser.add_argument("--libraries", default=",".join(LIBRARIES), help="run these only; the report needs both")
    parser.add_argument("--out", default="results/classification.csv")
    arguments = parser.parse_args()
    datasets, splits = arguments.datasets.split(","), [int(split) for split in arguments.splits.split(",")]
    libraries = arguments.libraries.split(",")
    results = ResultFile(arguments.out, COLUMNS, KEY)
    run(datasets, splits, libraries, results)
    if set(libraries) != set(LIBRARIES):
        return 0
    return 0 if report(datasets, splits, results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
