"""Likelihoods by name, for estimators and the command line."""

import difflib
import inspect
from typing import Any

from fathomgp._checks import shown
from fathomgp.errors import SettingError
from fathomgp.likelihoods._base import AbstractLikelihood
from fathomgp.likelihoods._bernoulli import Bernoulli
from fathomgp.likelihoods._gaussian import Gaussian, HeteroscedasticGaussian
from fathomgp.likelihoods._poisson import Poisson
from fathomgp.likelihoods._robustmax import RobustMax
from fathomgp.likelihoods._softmax import Softmax
from fathomgp.likelihoods._student_t import StudentT

LIKELIHOODS: dict[str, type[AbstractLikelihood]] = {
    "gaussian": Gaussian,
    "heteroscedastic": HeteroscedasticGaussian,
    "student_t": StudentT,
    "poisson": Poisson,
    "bernoulli": Bernoulli,
    "robustmax": RobustMax,
    "softmax": Softmax,
}


def likelihood_from_name(name: str, **kwargs: Any) -> AbstractLikelihood:
    """The likelihood of that name, built with ``kwargs``.

    Example:
        >>> likelihood_from_name("robustmax", num_classes=3).num_latents(1)
        3
    """
    if not isinstance(name, str) or name not in LIKELIHOODS:
        near = difflib.get_close_matches(str(name).lower(), LIKELIHOODS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SettingError(f"There is no likelihood {shown(name)}; the names are {', '.join(LIKELIHOODS)}.{hint}")
    try:
        inspect.signature(LIKELIHOODS[name]).bind(**kwargs)
    except TypeError as fault:
        raise SettingError(f"The likelihood {name!r} cannot be built from {sorted(kwargs)}: {fault}.") from None
    return LIKELIHOODS[name](**kwargs)
