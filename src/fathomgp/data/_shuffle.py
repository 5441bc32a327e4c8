"""The order of a stream's rows: an endless shuffle whose every stretch is a pure function of the seed.

Files are read by row groups, and a shuffle of everything would need everything in memory. So an epoch is cut into
pools, as many row groups each as the buffer holds, and each pool is shuffled as a whole. A pool takes one row group at
random from each stretch of the files, so that it looks like the data even where these are sorted: place in the stream
and place in the files are then all but uncorrelated. Any place of the stream can be found without reading what comes
before: a resumed run reads one pool and goes on.
"""

import dataclasses

import numpy as np

_DEALINGS = 32


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Rows ``begin`` to ``end`` of a pool.

    Attributes:
        epoch: number of the epoch.
        pool: number of the pool in the epoch.
        begin: the first row's place in the pool.
        end: one beyond the last row's place.
    """

    epoch: int
    pool: int
    begin: int
    end: int


class ShuffledOrder:
    """Which row groups form the pools of an epoch, and in which order a pool's rows go.

    Args:
        sizes: rows of every row group.
        buffer_rows: rows a pool, about; a pool holds at least one row group.
        seed: decides the order.
        ordered: no shuffle: a pool is one row group, in the order of the files.
    """

    def __init__(self, sizes: np.ndarray, buffer_rows: int, seed: tuple[int, ...], *, ordered: bool = False):
        self._sizes, self._seed, self._ordered = sizes, seed, ordered
        self.num_rows = int(sizes.sum())
        groups = len(sizes)
        self.num_pools = groups if ordered else int(np.clip(-(-self.num_rows // buffer_rows), 1, groups))
        self._epochs: dict[int, tuple[list[np.ndarray], np.ndarray]] = {}

    def stretches(self, first: int, count: int) -> list[Stretch]:
        """Where the rows ``first, ..., first + count - 1`` of the endless stream are."""
        found = []
        while count > 0:
            epoch, place = divmod(first, self.num_rows)
            ends = self._epoch(epoch)[1]
            pool = int(np.searchsorted(ends, place, side="right"))
            begin = place - (int(ends[pool - 1]) if pool else 0)
            taken = min(count, int(ends[pool]) - place)
            found.append(Stretch(epoch, pool, begin, begin + taken))
            first, count = first + taken, count - taken
        return found

    def after(self, stretch: Stretch) -> tuple[int, int]:
        """Epoch and number of the pool that follows."""
        last = stretch.pool + 1 == self.num_pools
        return (stretch.epoch + 1, 0) if last else (stretch.epoch, stretch.pool + 1)

    def groups(self, epoch: int, pool: int) -> np.ndarray:
        """Numbers of the pool's row groups."""
        return self._epoch(epoch)[0][pool]

    def permutation(self, epoch: int, pool: int, rows: int) -> np.ndarray:
        """The place in the pool of each of its rows."""
        if self._ordered:
            return np.arange(rows)
        return np.random.default_rng([*self._seed, epoch, pool + 1]).permutation(rows)

    def _epoch(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        """The row groups of each pool, and the place where each pool ends."""
        if epoch not in self._epochs:
            if len(self._epochs) > 4:  # two neighbours are all that a forward pass needs
                self._epochs.clear()
            pools = self._deal(epoch)
            self._epochs[epoch] = pools, np.cumsum([self._sizes[pool].sum() for pool in pools])
        return self._epochs[epoch]

    def _deal(self, epoch: int) -> list[np.ndarray]:
        """Neighbouring row groups go to different pools: each hand of ``num_pools`` is dealt out one to a pool.

        Of several dealings the one is taken in which the number of a pool says least about the place in the files.
        """
        groups, pools = len(self._sizes), self.num_pools
        if self._ordered:
            return [np.array([group]) for group in range(groups)]
        hands = np.tile(np.arange(pools), (_DEALINGS, -(-groups // pools), 1))
        dealt = np.random.default_rng([*self._seed, epoch, 0]).permuted(hands, axis=2)
        dealings = dealt.reshape(_DEALINGS, -1)[:, :groups]
        best = dealings[np.argmin([self._tendency(dealing) for dealing in dealings])]
        return [np.flatnonzero(best == pool) for pool in range(pools)]

    def _tendency(self, dealing: np.ndarray) -> float:
        """The absolute covariance of a row's pool and its place in the files."""
        share = self._sizes / self.num_rows
        place = np.cumsum(share) - 0.5 * share
        return abs(float(share @ ((dealing - share @ dealing) * (place - share @ place))))
