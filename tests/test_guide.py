"""The guide's examples run, from top to bottom, in one process."""

import pathlib
import re
import subprocess
import sys

import pytest

GUIDE = (pathlib.Path(__file__).parents[1] / "docs" / "guide.md").read_text()


@pytest.mark.slow
def test_the_guide_runs(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr
    said = run.stdout
    assert int(re.search(r"(\d+)% of the rows", said).group(1)) >= 80
    assert "['left' 'right']" in said
    assert "(300, 3)" in said
    assert "learned so far: 300" in said
    assert "The chains" in said
    assert "[2, 1, 1]" in said
