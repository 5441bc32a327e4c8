"""The oil-flow data in two latent dimensions: nearest-neighbour errors of PCA and of the GP-LVM, and a picture.

python benchmarks/oil_flow.py [rows] [picture.png]
"""

import sys
import time

import numpy as np

from fathomgp.data import load_dataset
from fathomgp.estimators import GPLVM


def errors(points: np.ndarray, phase: np.ndarray) -> int:
    gaps = np.sum((points[:, None] - points[None]) ** 2, axis=2)
    np.fill_diagonal(gaps, np.inf)
    return int(np.sum(phase[np.argmin(gaps, axis=1)] != phase))


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    oil = load_dataset("oil_flow")
    Y, phase = np.asarray(oil.X[:rows], float), np.ravel(oil.Y)[:rows]
    scaled = (Y - Y.mean(axis=0)) / Y.std(axis=0)
    linear = scaled @ np.linalg.svd(scaled, full_matrices=False)[2][:2].T
    began = time.perf_counter()
    model = GPLVM(2, random_state=0, verbose=False).fit(Y)
    print(f"{rows} rows, {time.perf_counter() - began:.0f} s, bound {-model.history_['objective'][-1]:.3f} a datum")
    print(f"nearest-neighbour errors: PCA {errors(linear, phase)}, GPLVM {errors(model.embedding_, phase)}")
    if len(sys.argv) > 2:
        picture(linear, model.embedding_, phase, sys.argv[2])


def picture(linear: np.ndarray, latent: np.ndarray, phase: np.ndarray, path: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    for axis, points, title in zip(axes, (linear, latent), ("PCA", "Bayesian GP-LVM"), strict=True):
        for name in np.unique(phase):
            axis.scatter(*points[phase == name].T, s=12, label=f"phase {int(name)}")
        axis.set_title(title)
    axes[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
