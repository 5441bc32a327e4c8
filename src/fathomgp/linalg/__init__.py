"""Linear algebra: the only room that factorises.

Safe Cholesky factors with one jitter policy, explicit inverses, the marginal likelihood of an exact GP, low rank plus
diagonal (Woodbury), pivoted Cholesky (ACA), birth and death scores of the collapsed sparse bound, and sums over
blocks of rows.
"""

from fathomgp.linalg._blocks import sum_blocks as sum_blocks
from fathomgp.linalg._cholesky import Factor as Factor
from fathomgp.linalg._cholesky import JitterPolicy as JitterPolicy
from fathomgp.linalg._cholesky import JitterReport as JitterReport
from fathomgp.linalg._cholesky import check_factor as check_factor
from fathomgp.linalg._cholesky import default_policy as default_policy
from fathomgp.linalg._cholesky import inverse_factor as inverse_factor
from fathomgp.linalg._cholesky import safe_cholesky as safe_cholesky
from fathomgp.linalg._cholesky import safe_inverse_factor as safe_inverse_factor
from fathomgp.linalg._inverse import gram_of_lower as gram_of_lower
from fathomgp.linalg._inverse import inverse_lower as inverse_lower
from fathomgp.linalg._inverse import logdet_lower as logdet_lower
from fathomgp.linalg._lowrank import LowRankPlusDiagonal as LowRankPlusDiagonal
from fathomgp.linalg._lowrank import WhitenedSums as WhitenedSums
from fathomgp.linalg._lowrank import evidence_from_raw_sums as evidence_from_raw_sums
from fathomgp.linalg._lowrank import evidence_from_sums as evidence_from_sums
from fathomgp.linalg._lowrank import low_rank_plus_diagonal as low_rank_plus_diagonal
from fathomgp.linalg._lowrank import sparse_evidence as sparse_evidence
from fathomgp.linalg._marginal import gaussian_log_marginal as gaussian_log_marginal
from fathomgp.linalg._pivoted import PivotedCholesky as PivotedCholesky
from fathomgp.linalg._pivoted import pivoted_cholesky as pivoted_cholesky
from fathomgp.linalg._products import product as product
from fathomgp.linalg._products import transposed_product as transposed_product
from fathomgp.linalg._scores import SparseBound as SparseBound
from fathomgp.linalg._scores import birth_scores as birth_scores
from fathomgp.linalg._scores import collapsed_bound as collapsed_bound
from fathomgp.linalg._scores import death_scores as death_scores
from fathomgp.linalg._scores import sparse_bound as sparse_bound
