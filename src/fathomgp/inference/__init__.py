"""How a model is learned: one algorithm, one file; the contracts that all of them keep."""

from fathomgp.inference._base import AbstractInference as AbstractInference
from fathomgp.inference._base import AbstractInfo as AbstractInfo
from fathomgp.inference._base import AbstractPosterior as AbstractPosterior
from fathomgp.inference._base import Buffer as Buffer
from fathomgp.inference._base import Phase as Phase
from fathomgp.inference._hamiltonian import hamiltonian_sampler as hamiltonian_sampler
from fathomgp.inference._hamiltonian import langevin_sampler as langevin_sampler
from fathomgp.inference._layered import LayeredPosterior as LayeredPosterior
from fathomgp.inference._sampled import SampledPosterior as SampledPosterior
from fathomgp.inference._sequential_recipes import dynamical_prior as dynamical_prior
from fathomgp.inference._sequential_recipes import reconstruction as reconstruction
from fathomgp.inference._sequential_recipes import with_heteroscedastic_noise as with_heteroscedastic_noise
from fathomgp.inference.decoupled import Decoupled as Decoupled
from fathomgp.inference.dsvi import DSVI as DSVI
from fathomgp.inference.exact import Exact as Exact
from fathomgp.inference.exact import ExactPosterior as ExactPosterior
from fathomgp.inference.sequential import Sequential as Sequential
from fathomgp.inference.sequential import SequentialPosterior as SequentialPosterior
from fathomgp.inference.sghmc import SGHMC as SGHMC
from fathomgp.inference.sgpr import SGPR as SGPR
from fathomgp.inference.stride import STRIDE as STRIDE
from fathomgp.inference.stride import STRIDEPosterior as STRIDEPosterior
