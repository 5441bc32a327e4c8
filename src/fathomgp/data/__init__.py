"""Where rows come from: tables, scaling, splits, named and generated datasets, and the sources the fit loop reads."""

from fathomgp.data._generated import step_function as step_function
from fathomgp.data._generated import step_truth as step_truth
from fathomgp.data._labels import read_labels as read_labels
from fathomgp.data._named import Dataset as Dataset
from fathomgp.data._named import fetch_dataset as fetch_dataset
from fathomgp.data._named import list_datasets as list_datasets
from fathomgp.data._named import load_dataset as load_dataset
from fathomgp.data._scaling import Moments as Moments
from fathomgp.data._scaling import Standardizer as Standardizer
from fathomgp.data._sources import AbstractFeed as AbstractFeed
from fathomgp.data._sources import AbstractSource as AbstractSource
from fathomgp.data._sources import ArraySource as ArraySource
from fathomgp.data._sources import Batch as Batch
from fathomgp.data._sources import FullFeed as FullFeed
from fathomgp.data._sources import IndexFeed as IndexFeed
from fathomgp.data._sources import padded_size as padded_size
from fathomgp.data._splits import k_fold as k_fold
from fathomgp.data._splits import random_split as random_split
from fathomgp.data._splits import standard_split as standard_split
from fathomgp.data._tables import Targets as Targets
from fathomgp.data._tables import read_inputs as read_inputs
from fathomgp.data._tables import read_table as read_table
from fathomgp.data._tables import read_targets as read_targets
