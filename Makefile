# Two commands: `make serve` and `make test`; and `make bench` for the figures. All make what they need in .venv.
# Another model or port: make serve MODEL=... ARGS="--port 8001"
PYTHON ?= python3
BIN := .venv/bin
MODEL ?= smollm2-135m-instruct
ARGS ?=

.PHONY: serve test test-all bench lint format clean

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

# The peers are compiled for this machine. Others: make bench PEER_PYTHON=... PEER_SERVER=.../llama-server
PEER_PYTHON ?= $(BIN)/python
PEER_SERVER ?=
BENCH := $(BIN)/tokenmill bench
BESIDE := --against llama-cpp --peer-python $(PEER_PYTHON)
PEER_MODELS ?= --peer-model same --peer-model build/bench/smollm2-135m.Q4_0.gguf
SHAPES := smollm2-135m llama-1.1b
FORMATS := Q4_0 Q4_K Q8_0 F16

.venv/bench: .venv/runtime
	@echo "fetching the benchmark's peers and compiling llama.cpp: some minutes, once"
	$(BIN)/pip install -q --group bench
	touch $@

build/bench/%.gguf:
	mkdir -p $(@D)
	$(BENCH) model $@ --like $(basename $*) --format $(subst .,,$(suffix $*))

bench: .venv/bench $(foreach s,$(SHAPES),$(foreach f,$(FORMATS),build/bench/$(s).$(f).gguf))
	$(BENCH) engine $(MODEL) --full $(BESIDE) $(PEER_MODELS)
	for shape in $(SHAPES); do for format in $(FORMATS); do \
	  $(BENCH) engine build/bench/$$shape.$$format.gguf --only "decode, 1 stream" $(BESIDE) || exit 1; done; done
	$(BENCH) serving $(MODEL) --against llama-server --workload all $(if $(PEER_SERVER),--peer-binary $(PEER_SERVER))
	$(BENCH) kernels $(MODEL)
	$(BENCH) report

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
