"""The one loop that all algorithms share: compiled chunks of steps, progress, checkpoints, guards, early stopping."""

from fathomgp.fitting._checkpoint import Checkpointing as Checkpointing
from fathomgp.fitting._distributed import is_first_process as is_first_process
from fathomgp.fitting._distributed import start_distributed as start_distributed
from fathomgp.fitting._loop import FitResult as FitResult
from fathomgp.fitting._loop import fit_model as fit_model
from fathomgp.fitting._progress import Callback as Callback
from fathomgp.fitting._stopping import EarlyStopping as EarlyStopping
