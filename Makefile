# On a new machine with Python 3.10+, a C/C++ compiler and access to the package registry:
#   make demo        build, quantize a model, generate text, compare types
#   make test        run the test suite
#   make check       check generated files, linter, types and quick tests: at most 3 minutes after make demo
#   make nightly     make test with the tests that take too long for it
#   make wheel       build a wheel for machines without a compiler in dist/
#   make windows     cross-compile the programs for Windows as a zip file in dist/
#   make gpu-bundle  build the GPU check for a machine without compilers in dist/
PYTHON ?= python3
VENV   := .venv
BIN    := $(CURDIR)/$(VENV)/bin
BUILD  := build/package
# -C options reach scikit-build-core and CMake: make demo CONFIG='-C cmake.define.GGML_CUDA=ON'
CONFIG ?=

# tests that make test skips
TIER   := -m "not nightly"
# further options of build_tests.py
MORE   :=

export PATH := $(BIN):$(PATH)

.PHONY: demo check test nightly wheel windows install bench cuda gpu-bundle gpu-check clean

demo: install
	@$(BIN)/python scripts/tools/demo.py

check: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/requirements-check.txt
	@$(BIN)/python scripts/build/gen_types.py --check
	@$(BIN)/python scripts/build/figures.py --check
	@$(BIN)/python scripts/build/options_doc.py --check
	@$(BIN)/python scripts/build/import_graph.py
	@$(BIN)/python scripts/build/lint.py
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m mypy py/ggml_ext
	@$(BIN)/python -m mypy --platform win32 --cache-dir .mypy_cache/win32 py/ggml_ext
	$(BIN)/python -m pytest -n 2 -m quick $(PYTEST_ARGS)
	@echo "skipped: tests of models, device code, emulated CPUs, the wheel and more row sizes; make test runs all"

test: install
	@$(BIN)/python scripts/build/build_tests.py --package $(BUILD) $(MORE)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TIER) $(PYTEST_ARGS)

nightly: TIER :=
nightly: MORE := --nightly
nightly: test

bench: install
	@$(BIN)/python scripts/tools/bench.py

# CUDA architectures for gpu-bundle and cuda: any of 75, 80, 86, 89, 90 and 120
ARCH ?= 90

# Build the GPU check for another machine as an archive in dist/; requires nvcc, but no GPU.
gpu-bundle: $(VENV)/.tools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "gguf>=0.17" numpy tqdm
	@$(BIN)/python scripts/build/gpu_bundle.py --arch "$(ARCH)" $(BUILD_ONLY)

# Compile and link the CUDA backend without making an archive.
cuda: BUILD_ONLY := --build-only
cuda: gpu-bundle

# Build and run the GPU check on this machine.
gpu-check: $(VENV)/.tools
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "gguf>=0.17" numpy tqdm
	@$(BIN)/python scripts/gpu/gpu_check.py $(ARGS)

# Build a wheel for all CPUs of this architecture, test it in an empty environment and put it in dist/.
wheel: $(VENV)/.tools
	@$(BIN)/python scripts/build/wheel.py

# Cross-compile the programs for x86-64 Windows with mingw-w64 and put them in dist/ as a zip file.
windows: $(VENV)/.tools
	@$(BIN)/python scripts/build/windows.py

# Without build isolation, so that later builds of single targets work in the build directory.
install: $(VENV)/.tools
	@mkdir -p build
	@echo "building; the log is build/install.log"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation -v \
	    -C build-dir=$(BUILD) -C cmake.define.GGML_EXT_TESTS=ON $(CONFIG) . > build/install.log 2>&1 \
	    || { tail -n 40 build/install.log; echo "error: the build failed; the complete log is build/install.log"; exit 1; }
	@sed -En 's/^ *(-- )?(chat page: left out)/\2/p' build/install.log

# -C requires pip 23.1; Debian 12 and Ubuntu 22.04 have older versions
$(VENV)/.tools:
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=23.1" "scikit-build-core>=0.10" cmake ninja "tomli; python_version < '3.11'"
	@touch $@

clean:
	rm -rf build $(VENV)
