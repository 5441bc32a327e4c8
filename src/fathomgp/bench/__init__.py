"""The papers' tables, run again beside the numbers that were published."""

from fathomgp.bench._methods import METHODS as METHODS
from fathomgp.bench._methods import configure as configure
from fathomgp.bench._methods import label as label
from fathomgp.bench._published import Score as Score
from fathomgp.bench._published import published_scores as published_scores
from fathomgp.bench._results import ResultFile as ResultFile
from fathomgp.bench._summary import average_ranks as average_ranks
from fathomgp.bench._summary import mean_scores as mean_scores
from fathomgp.bench._summary import row_label as row_label
from fathomgp.bench._summary import save_rank_diagram as save_rank_diagram
from fathomgp.bench._summary import select_rows as select_rows
from fathomgp.bench._uci import Job as Job
from fathomgp.bench._uci import Outcome as Outcome
from fathomgp.bench._uci import open_results as open_results
from fathomgp.bench._uci import plan_jobs as plan_jobs
from fathomgp.bench._uci import run_jobs as run_jobs
