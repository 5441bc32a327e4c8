"""fathomgp: deep Gaussian processes with honest error bars.

    from fathomgp import DeepGPRegressor, load

One model, every published way of fitting it, one kind of answer. The estimators run in double precision by themselves;
importing the package changes no global setting.
"""

from fathomgp._version import __version__ as __version__
from fathomgp.estimators import DeepGPRegressor as DeepGPRegressor
from fathomgp.estimators import load as load
