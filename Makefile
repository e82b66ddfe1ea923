# make demo: decode held-out problems with the embedded checkpoint.   make test: run what CI runs.
# make fuzz: check the laws of decoding on random models and calls for an hour, or MRP_FUZZ_SECONDS.
# All first create .venv if it is missing, and update it if pyproject.toml or constraints.txt have changed.
PYTHON ?= python3
PYTEST_ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint fuzz install

demo: $(INSTALLED)
	$(BIN)/mrp demo

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if git rev-parse --git-dir >/dev/null 2>&1; then $(BIN)/pre-commit run --all-files; fi

fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz_laws.py

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@
