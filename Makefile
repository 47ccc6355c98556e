# Every target sets up what it needs in .venv; a second run does nothing twice. `make help` lists them.
MODEL ?= minilm-l6
CORPUS ?= sample
SPLIT ?= all
MAPS ?= 1,2,3
STORE ?=
ARGS ?=
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPING := $(VENV)/.developing
BENCHMARKING := $(VENV)/.benchmarking
# The first interpreter that is new enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)

.DEFAULT_GOAL := help
.PHONY: help setup materialize test check bench

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 24

setup: $(DEVELOPING) ## Make .venv with the tested versions of everything

define install
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one with PYTHON=/path/to/python3"; exit 2; }
	@echo "Installing $(1) into $(VENV) (once; some minutes on a slow network)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e "$(2)"
	@touch $@
endef

$(INSTALLED): pyproject.toml constraints.txt
	$(call install,what ola needs,.)

$(DEVELOPING): $(INSTALLED)
	$(call install,what tests and checks need,.[dev])

$(BENCHMARKING): $(DEVELOPING)
	$(call install,what the store is measured beside,.[bench])

materialize: $(INSTALLED) ## Run MODEL over CORPUS and store its maps [SPLIT, MAPS, STORE, ARGS]
	@$(BIN)/ola materialize --model "$(MODEL)" --corpus "$(CORPUS)" --split "$(SPLIT)" --maps "$(MAPS)" \
		$(if $(STORE),--store "$(STORE)") $(ARGS)

test: $(DEVELOPING) ## Run the test suite
	@$(BIN)/python -m pytest -m "not slow and not bench" $(ARGS)

check: $(DEVELOPING) ## Format, lint, types, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench: $(BENCHMARKING) ## Measure, as ratios of two things timed in turn
	@$(BIN)/python -m pytest -m bench -q -s tests/bench $(ARGS)
