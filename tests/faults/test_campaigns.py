"""The campaigns of faults, a few cases each: ``make faults`` runs them at length."""

import csv
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize(("campaign", "cases"), [("campaign_input", 200), ("campaign_cli", 8)])
def test_a_campaign_finds_nothing(campaign, cases, tmp_path):
    # A process of its own: here, type checks from outside would refuse what the library should.
    out = tmp_path / "faults.csv"
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, str(HERE / f"{campaign}.py"), str(cases), str(out)]
    subprocess.run(command, check=True, timeout=900, env=environment, capture_output=True)
    with out.open(newline="") as file:
        (row,) = csv.DictReader(file)
    log = out.with_suffix(".log")
    found = {name: int(row[name]) for name in ("cases", "lost", "raw", "hung", "executed")}
    told = log.read_text() if log.exists() else ""
    assert found == {"cases": cases, "lost": 0, "raw": 0, "hung": 0, "executed": 0}, told
