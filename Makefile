# Two commands do everything on a fresh machine: `make demo` and `make test`.
#
# Variables:
#   PYTHON=python3.12   the interpreter the environment is made from (3.11 to 3.14)
#   DEVICE=cpu|gpu      which vLLM to install; by default gpu where nvidia-smi
#                       lists a GPU, else cpu
#   ARGS="..."          further options of `daric demo`, `daric bench`, pytest

PYTHON ?= python3
DEVICE ?= auto
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(DEVICE)
MODEL := smollm2-135m
DOCS := build/docs
# What the API reference describes.
DOCUMENTED := daric_rag daric_rag.config daric_rag.data daric_rag.engine \
	daric_rag.errors daric_rag.generation daric_rag.layout daric_rag.prompt \
	daric_rag.prompt_types daric_rag.storage daric_rag.trace

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install model demo bench lint types contracts tests test docs format clean

help:
	@echo "make demo    set everything up and watch DARIC answer questions"
	@echo "make test    set everything up; lint, types, import contracts, all tests"
	@echo "make bench   time to first token against full prefill, last line is JSON"
	@echo "make docs    write the API reference to $(DOCS)/index.html"
	@echo "make format  format the code and sort the imports"
	@echo "make clean   remove the environment and every cache in this folder"

# The installer runs on the bare interpreter (standard library only) and writes
# the stamp's folder; it runs again when the dependencies or it have changed.
$(STAMP): pyproject.toml daric_rag/_install.py
	@$(PYTHON) -I daric_rag/_install.py --venv $(VENV) --device $(DEVICE)
	@touch $@

install: $(STAMP)

model: install
	@$(BIN)/python -m daric_rag.models $(MODEL) > /dev/null

demo: model
	@$(BIN)/daric demo $(ARGS)

bench: model
	@$(BIN)/daric bench ttft --json $(ARGS)

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install
	@$(BIN)/mypy

contracts: install
	@$(BIN)/lint-imports

# Two processes, each on a core of its own; what shares an engine stays together.
tests: model
	@$(BIN)/pytest -n 2 --dist loadfile --benchmark-disable $(ARGS)

# One after the other even under `make -j`: two cores are soon full.
test: install
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory contracts
	@$(MAKE) --no-print-directory tests

docs: install
	@$(BIN)/python -m pdoc --docformat google -o $(DOCS) $(DOCUMENTED)

format: install
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	rm -rf .import_linter_cache .hypothesis
	find daric_rag tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
