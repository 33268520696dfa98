# Everything runs in .venv; nothing is installed outside it.
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench clean

PYTHON ?= python3
BIN := .venv/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

help:  ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/installed  ## make .venv and install eata into it, with what the tests need

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "eata needs Python 3.10 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

demo: setup  ## adapt a small trained net to 15 corruptions; a table, and a report page (under 3 minutes)
	$(BIN)/eata demo

lint: setup  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## everything: lint, types, tests, doctests
	$(BIN)/pytest

bench: setup  ## speed and memory of one adaptation step, as ratios
	$(BIN)/python -m benchmarks.step

clean:  ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
