# A new machine needs Python 3.11 or newer and make. `make` installs all other packages into .venv,
# in the versions and with the hashes of requirements.lock.

# Another release of JAX, in an environment of its own: make test JAX=0.10.1
JAX   :=
LOCKS := requirements.lock $(JAX:%=requirements-jax-%.lock)
VENV  := .venv$(JAX:%=-jax-%)
RUN   := $(VENV)/bin/python
STAMP := $(VENV)/.installed
BENCH := $(VENV)/.installed-bench
DOCS  := $(VENV)/.installed-docs
OTHER := $(VENV)/.installed-libraries
WHEEL := .venv-wheel
PIP   := $(RUN) -m pip install --quiet --disable-pip-version-check --only-binary :all: --no-deps

# About half of the packages of requirements.lock; both halves are installed side by side.
HALF := /^[a-n].*==/,/\# via/
# What the lock of another release replaces in requirements.lock.
ifneq ($(JAX),)
REPLACED := /^jax(lib)?==/,/\# via/d
$(if $(wildcard requirements-jax-$(JAX).lock),,$(error \
	JAX=$(JAX) has no lock file; there are $(wildcard requirements*.lock) (the latter without JAX=)))
endif

# The first Python that runs (a shim of a version manager may fail), is new enough and can make
# virtual environments. To choose another one: make PYTHON=/path/to/python
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
		>/dev/null 2>&1; then echo $$python; break; fi; done)

# Processes that run tests. Tests of processes wait often, so there is one more than two cores need.
WORKERS ?= 3
# How long `make long` runs: make long HOURS=1
HOURS   ?= 24

LOCK = uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header \
	--no-emit-index-url
LINT = $(RUN) -m ruff format --check . && $(RUN) -m ruff check . && $(RUN) -m mypy && \
	$(VENV)/bin/lint-imports --no-logo

# A worker that crashes is not replaced: pytest-xdist would then wait for ever.
TESTS = $(RUN) -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
	--max-worker-restart 0 --durations 15

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test long bench docs wheel release lint format lock clean
# Make a new environment if the Python of the old one is gone.
ifneq ($(shell $(RUN) -c 'print("here")' 2>/dev/null),here)
.PHONY: $(STAMP)
endif
ifneq ($(shell $(WHEEL)/bin/python -c 'print("here")' 2>/dev/null),here)
.PHONY: $(WHEEL)/.installed
endif

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)  ## train a small language model through the runtime
	@$(RUN) -m examples.train_lm

ifneq ($(JAX),)
test: $(STAMP)
	@$(TESTS) @tests/other_jax.txt
else
# The tests and the checks of `make lint` run side by side; the checks print when they are done.
test: $(STAMP)  ## everything CI checks: format, lint, types, import contracts, tests
	@(checks=$$({ $(LINT); } 2>&1); code=$$?; echo; echo "$$checks"; exit $$code) & \
	$(TESTS); \
	tests=$$?; wait $$! || { echo "error: make lint fails, see above"; exit 1; }; exit $$tests
endif

long: $(STAMP) $(OTHER)  ## a day of tests: marked long, other releases of JAX, then seeds, fuzzing and kills (HOURS=24)
	@$(RUN) -m tests.long --hours $(HOURS)

bench: $(BENCH)  ## run all benchmarks, in about 20 minutes
	@$(RUN) -m bench

docs: $(DOCS)  ## build the site of docs/, which works offline
	@$(RUN) -m sphinx --quiet --fail-on-warning --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

wheel: $(WHEEL)/.installed  ## build dist/openpathways-*.whl, for other environments
	@rm -rf build
	@$(WHEEL)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--wheel-dir dist .

release: $(STAMP)  ## build the sdist and the wheel of a tag, and try both in clean environments
	@$(RUN) -m tests.release

lint: $(STAMP)  ## format check, lint, types and import contracts
	@$(LINT)

format: $(STAMP)  ## format the code and fix what the linter can fix
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

lock:  ## resolve requirements*.lock and docs/requirements.lock again (needs uv)
	@$(LOCK) pyproject.toml --extra dev --output-file requirements.lock
	@for file in requirements-jax-*.lock; do release=$${file#requirements-jax-}; release=$${release%.lock}; \
		printf 'jax==%s\njaxlib==%s\n' $$release $$release | \
		$(LOCK) --no-deps - --output-file $$file || exit 1; done
	@$(LOCK) docs/requirements.in --output-file docs/requirements.lock --constraint requirements.lock \
		--constraint bench/requirements.txt --constraint bench/baselines/requirements.txt
	@$(LOCK) tests/libraries/requirements.in --output-file tests/libraries/requirements.lock \
		--constraint requirements.lock

clean:  ## remove the environment, caches and build outputs
	rm -rf $(VENV) .venv-jax-* $(WHEEL) build dist docs/_build *.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

define CHECK_PYTHON
@test -n "$(PYTHON)" || { \
	echo "error: no Python >= 3.11 with venv found; install one, or: make PYTHON=/path/to/python" >&2; \
	exit 1; }
endef

$(STAMP): pyproject.toml setup.py $(LOCKS)
	$(CHECK_PYTHON)
	@$(RUN) -m pip --version >/dev/null 2>&1 || { \
		echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing $(LOCKS) into $(VENV)"
	@sed -E '$(REPLACED)' requirements.lock | cat - $(wordlist 2, 2, $(LOCKS)) > $(VENV)/all.txt
	@sed -nE '$(HALF)p' $(VENV)/all.txt > $(VENV)/half.txt
	@sed -E '$(HALF)d' $(VENV)/all.txt > $(VENV)/rest.txt
	@$(PIP) --no-compile --require-hashes -r $(VENV)/half.txt & \
	$(PIP) --no-compile --require-hashes -r $(VENV)/rest.txt; code=$$?; wait $$! && exit $$code
	@$(RUN) -m pip uninstall --quiet --yes pw 2>/dev/null  # the project's former name
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# A wheel needs only the build backend, as it is locked.
$(WHEEL)/.installed: requirements.lock
	$(CHECK_PYTHON)
	@echo "creating $(WHEEL) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(WHEEL)
	@sed -n '/^setuptools==/,/# via/p' requirements.lock > $(WHEEL)/requirements.txt
	@$(WHEEL)/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: \
		--require-hashes -r $(WHEEL)/requirements.txt
	@touch $@

# The same environment: the reference is read from the code, and notebooks run. The versions of
# requirements.lock and of the benchmarks stay.
$(DOCS): $(STAMP) docs/requirements.lock
	@echo "installing the packages of the site into $(VENV)"
	@$(PIP) --require-hashes -r docs/requirements.lock
	@touch $@

# The versions of requirements.lock stay.
$(OTHER): $(STAMP) tests/libraries/requirements.lock
	@echo "installing the libraries of tests/libraries into $(VENV)"
	@$(PIP) --require-hashes -r tests/libraries/requirements.lock
	@touch $@

$(BENCH): $(STAMP) bench/requirements.txt bench/baselines/requirements.txt
	@echo "installing the packages of the benchmarks into $(VENV)"
	@$(PIP) -r bench/requirements.txt
	@$(PIP) -r bench/baselines/requirements.txt || \
		echo "some baselines could not be installed: the benchmarks leave them out"
	@touch $@
