"""Early stopping on the trend of a noisy objective."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Stop a phase when its objective no longer falls by more than its noise.

    After every ``window`` steps the mean objective of the last window is compared with the best earlier window: only a
    fall by more than ``tolerance`` and by more than two standard errors of the difference is progress. The test runs at
    fixed steps, so neither chunks nor checkpoints move the end; failed steps are left out.

    Attributes:
        window: steps a window.
        patience: windows without progress before the end.
        tolerance: the smallest fall, in units of the objective, that counts as progress.
    """

    window: int = 500
    patience: int = 2
    tolerance: float = 1e-3

    def stops(self, objectives: np.ndarray) -> bool:
        """Whether a phase with these objectives so far is at its end."""
        count = len(objectives) // self.window
        if count < self.patience + 2:
            return False
        windows = objectives[: count * self.window].reshape(count, self.window)
        windows = np.where(np.isfinite(windows), windows, np.nan)
        if np.any(np.all(np.isnan(windows), axis=1)):
            return False
        means = np.nanmean(windows, axis=1)
        errors = np.nanstd(windows, axis=1) / np.sqrt(self.window)
        return all(self._stalls(means, errors, count - 1 - back) for back in range(self.patience))

    def _stalls(self, means: np.ndarray, errors: np.ndarray, last: int) -> bool:
        best = int(np.argmin(means[:last]))
        noise = 2.0 * float(np.hypot(errors[best], errors[last]))
        return bool(means[best] - means[last] < max(self.tolerance, noise))
