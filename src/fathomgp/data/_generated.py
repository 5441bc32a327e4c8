"""Data made from a known function, so that the truth can be drawn beside a fit."""

import numpy as np
from jaxtyping import Float64


def step_truth(x: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
    """The ground truth of STRIDE's first example: smooth on the left, a staircase on the right.

        f(x) = int_0.1^0.4 N(y; x, 10^-4) sin(pi (y - 0.25) / 0.15) dy    for x <= 0.6
               -1 on (0.6, 0.75],  1 on (0.75, 0.9],  0 beyond

    The integral has a closed form: with ``s = 0.01``, ``w = pi / 0.15`` and ``t(y) = (y - x) / s``,

        Im[ exp(i w (x - 0.25) - (w s)^2 / 2) (erf((t(0.4) - i w s) / sqrt 2) - erf((t(0.1) - i w s) / sqrt 2)) / 2 ].

    The Gaussian is normalised, ``1 / sqrt(2 pi 10^-4)``: the factor as printed, ``1 / (sqrt(2 pi) 10^-4)``, would make
    the wave 98 high beside steps of height 1.

    Reference: Latz et al. (2025), STRIDE: sparse techniques for regression in deep Gaussian processes, section 4.1.
    """
    return np.select([x <= 0.6, x <= 0.75, x <= 0.9], [_smooth_wave(x), -1.0, 1.0], 0.0)


def step_function(
    n: int = 200, noise_std: float = 0.02, seed: int = 0
) -> tuple[Float64[np.ndarray, "N 1"], Float64[np.ndarray, " N"]]:
    """:func:`step_truth` at ``n`` equally spaced points of [0, 1], plus Gaussian noise.

    Example:
        >>> X, y = step_function(n=5, noise_std=0.0)
        >>> X[3:, 0].tolist(), y[3:].tolist()
        ([0.75, 1.0], [-1.0, 0.0])
    """
    x = np.linspace(0.0, 1.0, n)
    y = step_truth(x) + noise_std * np.random.default_rng(seed).standard_normal(n)
    return x[:, None], y


def _smooth_wave(x: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
    from scipy.special import erf

    width, frequency = 0.01, np.pi / 0.15
    tilt = 1j * frequency * width
    upper = erf(((0.4 - x) / width - tilt) / np.sqrt(2.0))
    lower = erf(((0.1 - x) / width - tilt) / np.sqrt(2.0))
    return np.imag(np.exp(1j * frequency * (x - 0.25) + tilt**2 / 2.0) * (upper - lower) / 2.0)
