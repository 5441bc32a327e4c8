"""Generated collisions: 28 inputs and a binary label through a hidden function, in the manner of HIGGS.

Twenty-one inputs are what a detector measures of a lepton, the missing energy and four jets; seven are masses that a
physicist would compute from them, here with the blur of a bad calibration. The label depends on sharp masses, which no
input gives: a model must find them. The probability of a label is known, so the best reachable AUC is too.
"""

import numpy as np
from jaxtyping import Float, Float32, Float64

_JETS = tuple(f"jet{j}_{part}" for j in range(1, 5) for part in ("pt", "eta", "phi", "b"))
_MASSES = ("m_jj", "m_jjj", "m_lv", "m_jlv", "m_bb", "m_wbb", "m_wwbb")

#: Column names of the inputs; the target is ``label``.
COLLIDER_INPUTS = ("lepton_pt", "lepton_eta", "lepton_phi", "missing_energy", "missing_phi", *_JETS, *_MASSES)

_BLUR = 0.35  # relative, of the seven masses
_MEASURED = 21


def signal_probability(X: Float[np.ndarray, "N 28"]) -> Float64[np.ndarray, " N"]:
    """``p(label = 1 | x)``, a function of the first 21 columns of :data:`COLLIDER_INPUTS`."""
    masses = _masses(X[:, :_MEASURED].astype(np.float64))
    m_jj, _, m_lv, _, m_bb, _, m_wwbb = np.log(masses).T
    tags = X[:, 8:21:4].astype(np.float64).sum(axis=1)
    resonance = 3.2 * _bump(m_bb, 0.25, 0.35) + 1.6 * _bump(m_jj, 0.1, 0.4) + 1.2 * _bump(m_lv, 0.0, 0.3)
    score = resonance - 3.3 + 0.5 * (tags - 2.0) * np.tanh(2.0 * m_bb) - 1.5 * np.tanh(1.5 * (m_wwbb - 1.1))
    return 1.0 / (1.0 + np.exp(-1.4 * score))


def draw_collisions(rows: int, rng: np.random.Generator) -> dict[str, Float32[np.ndarray, " N"]]:
    """Random collisions with their label, column by column, in float32 as they are stored."""
    measured = _measure(rows, rng).astype(np.float32)
    masses = _masses(measured.astype(np.float64)) * rng.lognormal(0.0, _BLUR, (rows, len(_MASSES)))
    X = np.column_stack([measured, masses.astype(np.float32)])
    label = rng.random(rows) < signal_probability(X)
    table = {name: np.ascontiguousarray(X[:, j]) for j, name in enumerate(COLLIDER_INPUTS)}
    return table | {"label": label.astype(np.float32)}


def best_collider_auc(rows: int = 200_000, seed: int = 0) -> float:
    """The AUC of the true probability: no classifier can expect more.

    With rows in the order of p, a pair (i, j) counts p_i (1 - p_j) when i has the larger p: the expectation over the
    labels, estimated on ``rows`` random collisions.
    """
    table = draw_collisions(rows, np.random.default_rng([seed, 1]))
    p = np.sort(signal_probability(np.column_stack([table[name] for name in COLLIDER_INPUTS])))
    below = np.cumsum(1.0 - p) - (1.0 - p)
    return float(p @ below / (p.sum() * (1.0 - p).sum()))


def _measure(rows: int, rng: np.random.Generator) -> Float64[np.ndarray, "N 21"]:
    """Momenta are positive with mean about 1; eta is a Gaussian, phi an angle; b is a tag of 0, 1 or 2."""

    def track() -> list[np.ndarray]:
        return [rng.gamma(4.0, 0.25, rows), rng.standard_normal(rows), rng.uniform(-np.pi, np.pi, rows)]

    missing = [rng.gamma(3.0, 1.0 / 3.0, rows), rng.uniform(-np.pi, np.pi, rows)]
    jets = [part for _ in range(4) for part in (*track(), rng.choice(3, rows, p=[0.5, 0.25, 0.25]))]
    return np.column_stack([*track(), *missing, *jets])


def _masses(measured: Float64[np.ndarray, "N 21"]) -> Float64[np.ndarray, "N 7"]:
    """Invariant masses of groups of the six objects: m^2 = sum over pairs 2 p_a p_b (cosh d_eta - cos d_phi)."""
    columns = measured.T
    lepton, missing = columns[0:3], np.stack([columns[3], np.zeros(len(measured)), columns[4]])
    one, two, three, four = (columns[5 + 4 * j : 8 + 4 * j] for j in range(4))
    groups = (
        [one, two],
        [one, two, three],
        [lepton, missing],
        [three, lepton, missing],
        [three, four],
        [one, two, three, four],
        [one, two, three, four, lepton, missing],
    )
    return np.column_stack([_mass(group) for group in groups])


def _mass(group: list[np.ndarray]) -> Float64[np.ndarray, " N"]:
    square = 0.0
    for i, a in enumerate(group):
        for b in group[:i]:
            square = square + 2.0 * a[0] * b[0] * (np.cosh(a[1] - b[1]) - np.cos(a[2] - b[2]))
    return np.sqrt(square) / len(group)


def _bump(x: np.ndarray, centre: float, width: float) -> np.ndarray:
    return np.exp(-0.5 * ((x - centre) / width) ** 2)
