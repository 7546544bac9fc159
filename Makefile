# make demo   sets up, then shows a whole run on this PC, in about two minutes
# make test   sets up, then runs every check and test
# make docs   builds the documents into build/site
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
ARGS ?=

.PHONY: setup demo test test-soak test-fast check bench docs clean
.DEFAULT_GOAL := test

setup: $(STAMP)

# torchvision comes without its dependencies: its own torch pin would pull another build. PyPI's CUDA build of it does
# not import beside a CPU torch; torchvision_operators.py explains and repairs that.
$(STAMP): pyproject.toml constraints.txt deploy/torchvision_operators.py
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'Ravnest needs Python 3.11 or newer, this is ' + sys.version"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchvision
	$(BIN)/python -c "import torchvision" 2>/dev/null || $(BIN)/python deploy/torchvision_operators.py
	touch $@

demo: setup
	$(BIN)/ravnest demo $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Three test processes at a time, each file in one of them: most tests wait for other processes anyway.
test: check
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# The whole fault matrix and the long variants of other tests: about half an hour.
test-soak: setup
	$(BIN)/python -m pytest -m soak $(ARGS)

# Without the slow ones: what to run while working.
test-fast: setup
	$(BIN)/python -m pytest -x -m "not slow and not soak" $(ARGS)

# Every benchmark, one after the other; ARGS=--quick takes a few minutes.
bench: setup
	for name in graph coverage memory pipeline staleness learning planner control wan rings clusters recovery dashboard real_size; do $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; done

# The documents, checked: a broken link or a page outside the navigation is an error.
docs: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --quiet --strict --clean

clean:
	rm -rf $(VENV) build src/*.egg-info .mypy_cache .ruff_cache .hypothesis
