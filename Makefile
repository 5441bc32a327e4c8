# Every target creates .venv when there is none; nothing depends on what was installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-all faults lint format bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/fathomgp demo

# Two worker processes, one BLAS thread each: the suite is bound by compilation, which the workers share out.
test: $(STAMP)
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations 15

# With the tests that compile longest.
test-all: $(STAMP)
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or not slow"

# The long campaign of faults: hours; started again, it goes on. See docs/reliability.md.
faults: $(STAMP)
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 nice -n 15 $(BIN)/python tests/faults/long.py

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python benchmarks/exact_vs_sklearn.py

clean:
	rm -rf $(VENV) fathomgp-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
