# `make` lists what there is. Everything runs in .venv, which `make setup` creates and keeps current.
PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin
DIST := dist
SETUP := $(PYTHON) scripts/setup.py $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))
# One OpenMP thread: on few cores, OpenMP threads that wait for each other by spinning cost more
# than they bring on models as small as the tests'.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-versions test-transformers test-asan test-numa-system lint bench bench-more bench-peers wheel clean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1: \2/p' $(MAKEFILE_LIST)

setup:  ## create .venv, install everything, compile the kernels (quick when nothing changed)
	@$(SETUP)

demo:  ## fine-tune a small mixture-of-experts model on this machine and see the difference
	@$(SETUP) --demo
	@$(BIN)/python examples/demo.py

test: setup  ## the tests, as CI runs them
	$(TEST) -m "not slow"

test-all: setup  ## the tests, the slow ones too
	$(TEST)

test-versions: setup  ## tests with the oldest, pip's and the newest libraries; writes docs/versions.md
	$(BIN)/python scripts/test_versions.py $(if $(LLAMAFACTORY),--llamafactory $(LLAMAFACTORY))

test-transformers: setup  ## transformers' own model tests with our experts: TRANSFORMERS=checkout FAMILIES="qwen3_moe"
	$(BIN)/python scripts/model_tests.py $(if $(TRANSFORMERS),--transformers $(TRANSFORMERS)) $(FAMILIES)

test-asan: setup  ## the kernel tests with AddressSanitizer and UBSan (g++; a few minutes)
	$(BIN)/python scripts/test_asan.py

test-numa-system: setup  ## NUMA binding on virtual machines with several nodes (qemu-system-x86_64)
	$(BIN)/python scripts/numa_system.py

lint: setup  ## ruff, mypy and clang-format, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@find csrc tests -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run --Werror

bench: setup  ## time the expert kernels against the machine's roofs and transformers
	$(BIN)/python bench/run.py

bench-more: setup  ## dispatch, a training layer's memory, the optimizer step, decode in generate
	$(BIN)/python bench/dispatch.py
	$(BIN)/python bench/memory.py
	$(BIN)/python bench/optimizer.py
	$(BIN)/python bench/generate.py

bench-peers: setup  ## the same with kt-kernel beside them, in a virtual environment of its own (1.2 GB)
	$(BIN)/python bench/peers_setup.py
	$(BIN)/python bench/run.py --peers

wheel: setup  ## build a manylinux wheel with every tier into dist/, checked by auditwheel
	rm -rf $(DIST)/raw
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST)/raw .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m auditwheel repair --plat manylinux_2_28_x86_64 \
	  --wheel-dir $(DIST) $(DIST)/raw/*.whl
	rm -r $(DIST)/raw

clean:  ## remove what was built and trained (.venv stays; `rm -r .venv` removes it)
	rm -rf build dist demo .pytest_cache .mypy_cache .ruff_cache
