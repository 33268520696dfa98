# Everything runs in .venv; nothing is installed outside it.
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint dist bench docs clean

PYTHON ?= python3
BIN := .venv/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

help:  ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What each needs and no more: a demonstration should not wait for Ray.
setup: .venv/dev  ## make .venv and install eata into it, with what the tests need

.venv/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "eata needs Python 3.10 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/bench .venv/docs .venv/dev: .venv/%: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install --quiet --editable '.[$*]'
	@touch $@

demo: .venv/bench  ## adapt a small trained net to 15 corruptions; a table, and a report page (under 2 minutes)
	$(BIN)/eata demo

lint: setup  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## everything: lint, types, tests, doctests
	$(BIN)/pytest

dist: setup  ## the wheel and the source archive, checked
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*

bench: setup  ## speed and memory of one adaptation step, as ratios
	$(BIN)/python -m benchmarks.step

docs: .venv/docs  ## the site, into docs/_build/html; warnings are errors, and every link leads somewhere
	$(BIN)/sphinx-build -E -W --keep-going -q docs docs/_build/html
	$(BIN)/python docs/links.py docs/_build/html
	@echo "open docs/_build/html/index.html"

clean:  ## remove .venv and caches
	rm -rf .venv dist docs/_build docs/generated .pytest_cache .mypy_cache .ruff_cache .hypothesis
