# Two commands: `make serve` and `make test`. Both make what they need in .venv.
# Another model or port: make serve MODEL=... ARGS="--port 8001"
PYTHON ?= python3
BIN := .venv/bin
MODEL ?= smollm2-135m-instruct
ARGS ?=

.PHONY: serve test test-all lint format clean

$(BIN)/python:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -U pip

.venv/runtime: $(BIN)/python pyproject.toml CMakeLists.txt $(wildcard src/tokenmill/backends/cpu/csrc/*)
	@echo "building tokenmill's kernels and fetching what it needs: some minutes, once"
	$(BIN)/pip install -q -e .
	touch $@

.venv/test: .venv/runtime
	@echo "fetching what the tests need, torch among it: some minutes, once"
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q --group test
	touch $@

serve: .venv/runtime
	$(BIN)/tokenmill serve $(MODEL) $(ARGS)

test: .venv/test lint
	$(BIN)/python -m pytest -m "not slow"

test-all: .venv/test lint
	$(BIN)/python -m pytest

lint: .venv/test
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror src/tokenmill/backends/cpu/csrc/*

format: .venv/test
	$(BIN)/ruff check --fix src tests
	$(BIN)/ruff format src tests
	$(BIN)/clang-format -i src/tokenmill/backends/cpu/csrc/*

clean:
	rm -rf .venv build
