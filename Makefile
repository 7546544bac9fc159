# make demo   sets up, then trains a small GPT on this PC, visibly
# make test   sets up, then runs every check and test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
ARGS ?=

.PHONY: setup demo test test-soak test-fast check bench clean
.DEFAULT_GOAL := test

setup: $(STAMP)

# torchvision comes without its dependencies: its own torch pin would pull another build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'Ravnest needs Python 3.11 or newer, this is ' + sys.version"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchvision
	touch $@

demo: setup
	$(BIN)/ravnest demo $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two test processes at a time, each file in one of them: most tests wait for other processes anyway.
test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# Everybody who could fail, in every way, at every moment: about half an hour.
test-soak: setup
	RAVNEST_SOAK=1 $(BIN)/python -m pytest tests/recovery $(ARGS)

# Without the slow ones: what to run while working.
test-fast: setup
	$(BIN)/python -m pytest -x -m "not slow" $(ARGS)

# Every benchmark, one after the other; ARGS=--quick takes a few minutes.
bench: setup
	for name in graph pipeline staleness planner control wan rings clusters recovery; do $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; done

clean:
	rm -rf $(VENV) build src/*.egg-info .mypy_cache .ruff_cache .hypothesis
