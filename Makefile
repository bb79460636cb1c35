# Two commands do everything on a fresh machine with Python 3.10+, a C/C++ compiler and the package registry:
#   make demo    build, quantize the embedded model, generate text, compare types
#   make test    the whole test suite
#   make check   what to run while working: lists, linter and quick tests; at most 3 minutes after make demo
# make nightly   make test, and the tests that are too long for it
# make wheel     a wheel for machines without a compiler, into dist/
# make gpu-bundle the GPU check for a machine with a GPU and nothing else, into dist/
PYTHON ?= python3
VENV   := .venv
BIN    := $(CURDIR)/$(VENV)/bin
BUILD  := build/package
# -C options reach scikit-build-core and CMake: make demo CONFIG='-C cmake.define.GGML_CUDA=ON'
CONFIG ?=

# which tests make test leaves out
TIER   := -m "not nightly"
# what only nightly builds for its tests
MORE   :=

export PATH := $(BIN):$(PATH)

.PHONY: demo check test nightly wheel install bench cuda gpu-bundle gpu-check clean

demo: install
	@$(BIN)/python scripts/tools/demo.py

check: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/requirements-check.txt
	@$(BIN)/python scripts/build/gen_types.py --check
	@$(BIN)/python scripts/build/figures.py --check
	@$(BIN)/python scripts/build/options_doc.py --check
	@$(BIN)/python scripts/build/import_graph.py
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m mypy py/ggml_ext
	$(BIN)/python -m pytest -n 2 -m quick $(PYTEST_ARGS)
	@echo "left out: tests that run models, device code, emulated processors, the wheel and more lengths of rows; make test runs all"

test: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt
	@$(BIN)/python scripts/build/build_tests.py --package $(BUILD) $(MORE)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TIER) $(PYTEST_ARGS)

nightly: TIER :=
nightly: MORE := --nightly
nightly: test

bench: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check scipy-openblas32
	@$(BIN)/python scripts/tools/bench.py
	@$(BIN)/python scripts/tools/bench.py --gemv

# of make gpu-bundle and make cuda: CUDA architectures, of 75, 80, 86, 89, 90 and 120
ARCH ?= 90

# The GPU check for another machine, as an archive in dist/; needs nvcc, not a GPU.
gpu-bundle: $(VENV)/.tools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "gguf>=0.17" numpy tqdm
	@$(BIN)/python scripts/build/gpu_bundle.py --arch "$(ARCH)" $(BUILD_ONLY)

# The whole CUDA backend compiled and linked, for no machine.
cuda: BUILD_ONLY := --build-only
cuda: gpu-bundle

# The GPU check on this machine, built first.
gpu-check: $(VENV)/.tools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "gguf>=0.17" numpy tqdm
	@$(BIN)/python scripts/gpu/gpu_check.py $(ARGS)

# One wheel for all processors of this architecture, tested in an empty environment before it gets into dist/.
wheel: $(VENV)/.tools
	@$(BIN)/python scripts/build/wheel.py

# Without build isolation, so that the build folder keeps working for later builds of single targets.
install: $(VENV)/.tools
	@mkdir -p build
	@echo "building; the log is build/install.log"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation -v \
	    -C build-dir=$(BUILD) -C cmake.define.GGML_EXT_TESTS=ON $(CONFIG) . > build/install.log 2>&1 \
	    || { tail -n 40 build/install.log; echo "error: the build failed; the complete log is build/install.log"; exit 1; }
	@sed -n 's/^ *-- \(chat page: left out\)/\1/p' build/install.log

# pip 23.1 knows -C; Debian 12 and Ubuntu 22.04 bring older ones
$(VENV)/.tools:
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=23.1" "scikit-build-core>=0.10" cmake ninja "tomli; python_version < '3.11'"
	@touch $@

clean:
	rm -rf build $(VENV)
