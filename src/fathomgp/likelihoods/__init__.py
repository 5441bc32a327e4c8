"""Likelihoods: how observations arise from latent function values.

Every likelihood keeps the contract of :class:`AbstractLikelihood`; :mod:`fathomgp.likelihoods.testing` checks it, for
likelihoods of your own too.
"""

from fathomgp.likelihoods._base import AbstractLikelihood as AbstractLikelihood
from fathomgp.likelihoods._bernoulli import Bernoulli as Bernoulli
from fathomgp.likelihoods._checks import refuse_sizes as refuse_sizes
from fathomgp.likelihoods._classes import AbstractClassLikelihood as AbstractClassLikelihood
from fathomgp.likelihoods._gaussian import Gaussian as Gaussian
from fathomgp.likelihoods._gaussian import HeteroscedasticGaussian as HeteroscedasticGaussian
from fathomgp.likelihoods._gaussian import has_noise_of_rows as has_noise_of_rows
from fathomgp.likelihoods._gaussian import likelihood_of_rows as likelihood_of_rows
from fathomgp.likelihoods._gaussian import with_known_noise as with_known_noise
from fathomgp.likelihoods._poisson import Poisson as Poisson
from fathomgp.likelihoods._registry import LIKELIHOODS as LIKELIHOODS
from fathomgp.likelihoods._registry import likelihood_from_name as likelihood_from_name
from fathomgp.likelihoods._robustmax import RobustMax as RobustMax
from fathomgp.likelihoods._softmax import Softmax as Softmax
from fathomgp.likelihoods._student_t import StudentT as StudentT
