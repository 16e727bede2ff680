# Everything installs into .venv; no target needs anything but Python 3.11+, make and a C compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: serve test lint format protos bench clean help

help:            ## list the targets
	@grep -E '^[a-z]+: .*##|^[a-z]+:  *##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint,bench]'
	touch $@

serve: $(STAMP)  ## serve the bundled pair: HTTP on 8000, gRPC on 9000, loopback
	$(BIN)/serve run deploy/local.yaml

test: $(STAMP)   ## run the tests
	$(BIN)/python -m pytest -q

lint: $(STAMP)   ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## reformat in place
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(STAMP) ## regenerate specdec_ray/pb from protos/
	$(BIN)/python protos/generate.py

bench: $(STAMP)  ## run the benchmarks and print their tables
	$(BIN)/python benchmarks/single_stream.py
	$(BIN)/python benchmarks/round_overhead.py
	$(BIN)/python benchmarks/acceptance.py
	$(BIN)/python benchmarks/batch_flips.py

clean:           ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
