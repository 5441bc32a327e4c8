"""The command line: fit, predict, evaluate, demo, data, bench.

Whatever goes wrong on purpose ends in one line on stderr that names cause and remedy, and in exit code 2.
"""

from fathomgp.cli._app import app as app
from fathomgp.cli._app import main as main
