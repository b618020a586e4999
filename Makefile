# `make run` and `make test` need only python3 (>= 3.10, with venv) and make; both are quick when repeated.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
PROMPT := Sir Walter Elliot, of Kellynch Hall, in Somersetshire, was a man who, for his own \
amusement, never took up any book but the Baronetage; there he found occupation for an idle hour, \
and consolation in a distressed one;

.DEFAULT_GOAL := help
.PHONY: help run test lint types pytest format docs clean check-clients

help:
	@echo "make run     install the runtime, continue a text with the bundled model"
	@echo "make test    install the developer tools, then lint, types and all tests"
	@echo "make lint | types | pytest | format | docs | clean"
	@echo "make check-clients  run other people's clients against the server (minutes; downloads them)"

run: $(VENV)/runtime.stamp
	@$(BIN)/yocolm generate --model bundled --echo --stream --max-tokens 96 --temperature 0.7 \
	    --top-p 0.95 --seed 7 "$(PROMPT)"

test: lint types pytest

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check src tests docs recipes bench
	$(BIN)/ruff format --check src tests docs recipes bench

types: $(VENV)/dev.stamp
	$(BIN)/pyright --pythonpath $(BIN)/python

# The second run is that of a machine without kernels: all paths, and other implementations' outputs.
pytest: $(VENV)/dev.stamp
	$(BIN)/python -m pytest $(PYTEST_ARGS)
	YOCOLM_NATIVE=0 $(BIN)/python -m pytest $(PYTEST_ARGS) tests/conformance tests/golden

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix src tests docs recipes bench
	$(BIN)/ruff format src tests docs recipes bench

docs: $(VENV)/dev.stamp
	$(BIN)/python docs/make_cli.py

# Each client in an environment of its own: their dependencies do not go together.
check-clients: $(VENV)/runtime.stamp
	BIN=$(BIN) bash bench/check_clients.sh

clean:
	rm -rf $(VENV) .venv-clients .pytest_cache .ruff_cache .hypothesis build dist
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps depend on everything that decides what is installed. The build back end comes from the
# same pins (no isolated build environment), so a clone installs the same versions tomorrow.
$(BIN)/python:
	$(PYTHON) -m venv --clear $(VENV)

$(VENV)/runtime.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the runtime into $(VENV) (mostly PyTorch; minutes on the first run)"
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/runtime.stamp
	$(PIP_INSTALL) --no-build-isolation --editable ".[dev]"
	@touch $@
