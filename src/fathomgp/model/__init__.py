"""What is believed: layers of Gaussian processes, a likelihood, and recipes that build a good start from data."""

from fathomgp.model._architectures import ARCHITECTURES as ARCHITECTURES
from fathomgp.model._architectures import AbstractArchitecture as AbstractArchitecture
from fathomgp.model._architectures import Composition as Composition
from fathomgp.model._architectures import ConvolutionArchitecture as ConvolutionArchitecture
from fathomgp.model._architectures import Injective as Injective
from fathomgp.model._architectures import find_architecture as find_architecture
from fathomgp.model._conditional import Conditional as Conditional
from fathomgp.model._conditional import MeanTerm as MeanTerm
from fathomgp.model._conditional import Whitened as Whitened
from fathomgp.model._conditional import Whitener as Whitener
from fathomgp.model._conditional import condition_on as condition_on
from fathomgp.model._conditional import joint_moments as joint_moments
from fathomgp.model._conditional import known as known
from fathomgp.model._conditional import moments as moments
from fathomgp.model._conditional import prepare as prepare
from fathomgp.model._conditional import prepare_all as prepare_all
from fathomgp.model._conditional import project as project
from fathomgp.model._conditional import sample_path as sample_path
from fathomgp.model._deep import DeepGP as DeepGP
from fathomgp.model._deep import Layer as Layer
from fathomgp.model._deep import separate_outputs as separate_outputs
from fathomgp.model._recipes import RECIPES as RECIPES
from fathomgp.model._recipes import Recipe as Recipe
from fathomgp.model._recipes import build_model as build_model
from fathomgp.model._recipes import kmeans_centres as kmeans_centres
