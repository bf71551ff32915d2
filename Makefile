# `make demo` and `make test` set up what they need; nothing else has to be installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test setup lint types contracts unit slow clean

demo: $(VENV)/.ready
	$(BIN)/paceline demo

test: lint types contracts unit

setup: $(VENV)/.ready

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready-dev
	$(BIN)/mypy

contracts: $(VENV)/.ready-dev
	$(BIN)/lint-imports

unit: $(VENV)/.ready-dev
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4

slow: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -m slow

# The pinned torch first: without the pin, pip takes a CUDA build of several gigabytes.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '$(1)'
	touch $(VENV)/.ready
endef

$(VENV)/.ready: pyproject.toml constraints.txt CMakeLists.txt
	$(call install,.)

$(VENV)/.ready-dev: pyproject.toml constraints.txt CMakeLists.txt
	$(call install,.[dev])
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
