"""A process that saves the same bundle again and again, for test_saves: ``writer.py directory seed rounds``."""

import sys

import numpy as np

from fathomgp.persistence import save_bundle

directory, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for i in range(rounds):
    number = 1000.0 * seed + i
    save_bundle(directory, "model", {"number": number, "array": np.full(2000, number)})
