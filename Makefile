# The commands of this project, for people and for CI alike. `make` alone lists them.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

# Engines that run without an accelerator: one that cannot run here fails the tests.
ENGINES ?= numpy,torch,jax,mlx$(if $(filter Darwin,$(shell uname -s)),,$(comma)opencl)
comma   := ,

# One stamp a set-up: they lie in the environment, so that deleting it deletes them.
BASE  := $(VENV)/.ready-base
DEMO  := $(VENV)/.ready-demo
CHAT  := $(VENV)/.ready-chat
TESTS := $(VENV)/.ready-test
DOCS  := $(VENV)/.ready-docs
DIST  := $(VENV)/.ready-dist

# One worker more than there are cores, since some wait for the processes that they started.
CORES   := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN || echo 1)
WORKERS ?= $(shell expr $(CORES) + 1)

# Many tests start Python anew, which reads what was compiled once, whatever the shell says of that.
PYTEST := PYTHONDONTWRITEBYTECODE= ANYDEVICE_TEST_ENGINES=$(ENGINES) $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=worksteal

# A small language model, which the package index has: to talk to, and for the tests.
MODEL := .cache/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet

.DEFAULT_GOAL := help
.PHONY: help demo chat test check bench pictures docs dist versions soak soak-isa coverage clean model-if-possible templates-if-possible

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO) ## the whole story in a minute: find, choose, move, chat, train, prove
	@$(BIN)/python demo/story.py

chat: $(CHAT) $(if $(FOLDER),,$(MODEL)) ## talk to a small language model; FOLDER=path for another, ARGS="--help" for options
	@$(BIN)/anydevice chat "$(or $(FOLDER),$(MODEL))" $(ARGS)

test: $(TESTS) model-if-possible ## all tests; ARGS="tests/ops -x" for some
	$(PYTEST) $(or $(ARGS),tests)

coverage: $(TESTS) model-if-possible ## all tests, and the coverage that they must reach; line by line in htmlcov/
	$(PYTEST) tests --cov --cov-report=term --cov-report=html --cov-fail-under=95

check: $(TESTS) ## format, lint, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(TESTS) ## how fast discovery is, against importing torch
	$(BIN)/python bench/discovery.py $(ARGS)

# Each is made from a run on this machine, and says what it lacks if it cannot be.
pictures: $(TESTS) model-if-possible ## the pictures of README.md and the docs, from real runs; ARGS="plan watch" for some
	$(BIN)/python docs/make_pictures.py $(ARGS)

docs: $(DOCS) ## build the documentation into site/, and check its links, widths and contrast
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m tests.check_site site

dist: $(TESTS) $(DIST) ## build what is published, check it, and run the README from the built wheel
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/check_dist.py dist

# PYTHONS="/a/python3.12 /b/python3.13" names interpreters beside those on the path and those of
# pyenv, ONLY=oldest narrows the environments, MISSING=skip leaves out those without interpreter.
versions: model-if-possible ## all tests on each Python, with the oldest and newest libraries; ARGS=tests/core for some
	@$(BIN)/python tests/run_versions.py --pythons="$(PYTHONS)" --only="$(ONLY)" \
	  --missing=$(or $(MISSING),fail) $(ARGS)

soak: $(TESTS) model-if-possible templates-if-possible soak-isa ## the long form of the tests, and those of numbers on lesser processors
	ANYDEVICE_TEST_ENGINES=$(ENGINES) $(BIN)/python -m pytest -m soak --timeout=3600 $(ARGS)

# The tests give the same verdict whatever instructions and threads the libraries use, in any order.
soak-isa: $(TESTS) model-if-possible
	ANYDEVICE_TEST_ENGINES=$(ENGINES) $(BIN)/python tests/soak_isa.py $(ROUNDS)

clean: ## delete everything that these commands made
	rm -rf $(VENV) dist site htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache \
	  .import_linter_cache .hypothesis .cache
	find src tests demo bench -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up, done once and again when pyproject.toml changes ---------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "anydevice needs Python 3.11 or newer, and $(PYTHON) is not that."; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module. On Debian and Ubuntu: apt install python3-venv"; \
	  exit 1; } >&2
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(BASE): pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	@touch $@

# The demo trains a model: where no library with gradients is installed, JAX is the smallest. It
# chats where the index has what that needs, and goes on without it otherwise.
$(DEMO): $(BASE)
	@echo "setting up, which takes a minute the first time"
	@$(BIN)/python -c 'import sys; from importlib.util import find_spec; \
	  sys.exit(not any(map(find_spec, ("torch", "jax", "mlx"))))' || $(PIP) --editable ".[jax]"
	@$(PIP) --editable ".[llm]" || echo "going on without libraries for language models"
	@$(BIN)/python demo/fetch_model.py --optional
	@touch $@

# Text for language models, and a library that computes: on a Mac the one for its GPU, beside an
# NVIDIA driver the one for that, else JAX, the smallest of those that compile.
$(CHAT): $(BASE)
	@echo "setting up, which takes a minute the first time"
	$(PIP) --editable ".[llm$(shell test -e /dev/nvidiactl && echo ,cuda)]"
	@$(BIN)/python -c 'import sys; from importlib.util import find_spec; \
	  sys.exit(not any(map(find_spec, ("torch", "jax", "mlx"))))' || \
	  $(PIP) --editable ".[$(if $(filter Darwin,$(shell uname -s)),mlx,jax)]"
	@touch $@

$(MODEL): | $(BIN)/python
	@$(BIN)/python demo/fetch_model.py

# Where the index cannot be reached, the tests that need the model are skipped.
model-if-possible: | $(BIN)/python
	@$(BIN)/python demo/fetch_model.py --optional

# So it is with real chat templates, which the long form of the tests compares.
templates-if-possible: | $(BIN)/python
	@$(BIN)/python tests/llm/fetch_templates.py

$(TESTS): pyproject.toml | $(BIN)/python
	$(PIP) --editable ".[test]"
	@$(BIN)/python tests/fix_pocl.py
	@touch $@ $(BASE) $(CHAT)

$(DOCS): pyproject.toml | $(BIN)/python
	$(PIP) --editable ".[docs]"
	@touch $@ $(BASE)

$(DIST): pyproject.toml | $(BIN)/python
	$(PIP) "build>=1.2" "twine>=6"
	@touch $@
