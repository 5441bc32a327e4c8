"""fathomgp: deep Gaussian processes with honest error bars."""
