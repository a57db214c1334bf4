# Every target sets up its own environment; the second time it is there already. `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Options of pytest, e.g. AGAIN=--last-failed: only what failed the last time.
AGAIN  ?=
RUNTIME := $(VENV)/.runtime
DEV     := $(VENV)/.dev
MUTANTS := $(VENV)/.mutants
EXAMPLES := $(VENV)/.examples
# The frameworks that the adapters are for: in an environment of their own, over the one above.
INTEGRATIONS := $(VENV)-integrations
DOCS := $(VENV)-docs

# One file goes to one worker, and there is a worker for each of two cores. What takes longest begins first.
PYTEST   = $(BIN)/pytest -n $(or $(JOBS),2) --dist loadfile --no-loadscope-reorder --durations 10 --durations-min 1
# What pyproject.toml leaves out: pytest forgets that as soon as there is an -m.
HERE    := not slow and not first_hour and not rdma and not frameworks and not compose and not gpu

.PHONY: help demo demo-mnist test processes proofs corpus test-integrations test-rdma test-rdma-faults test-rdma-job bench-rdma test-gpu test-compose pictures goldens mutants lint hooks docs first-hour setup wheel clean
.DEFAULT_GOAL := demo

help: ## this list
	@sed -nE 's/^([a-z][a-z-]*):[^#]*## *(.*)$$/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

# What users need, and no tool of the developers.
demo: $(RUNTIME) ## two hosts, a spare, four faults; installs no developer tools (1 minute)
	@$(BIN)/flyball demo

# An ordinary script with flyball.save and flyball.load, killed again and again; on scikit-learn's digits.
demo-mnist: $(EXAMPLES) ## an ordinary script with flyball.save and flyball.load, killed again and again (1 minute)
	@$(BIN)/python examples/mnist_killed.py

# Ring 1: in process, with SQLite, memory and folders. A test that starts a process or asks a server fails here.
test: $(DEV) ## ring 1, in process: the first answer (4 minutes)
	$(PYTEST) -m "not processes and not proof and $(HERE)" $(RING_1) $(AGAIN)
RING_1 := tests/architecture tests/unit tests/property tests/simulation tests/conformance tests/corruption

# Ring 2: what starts our processes, or asks MariaDB, Redis, S3, a browser.
processes: $(DEV) ## ring 2, processes and servers, one at a time per core (10 minutes)
	$(PYTEST) -m "processes and $(HERE)" tests $(AGAIN)

# Ring 3: whole clusters whose processes, services and databases are killed; the command line's flows from start to end; what
# the other rings have a part of: simulated clusters, kills, slot histories; the demo; the benchmarks at their smallest (those
# of DCP, of resharding, of trust and of goodput under faults with -m slow). Then 2,500 hosts, of which none may be blamed.
proofs: JOBS ?= 3
proofs: $(DEV) ## ring 3, whole clusters that are killed again and again, flows, benchmarks (16 minutes)
	$(PYTEST) -m "proof and not slow" tests/integration tests/first_contact tests/corruption tests/simulation tests/property tests/capture_corpus $(AGAIN)
	$(BIN)/python benchmarks/control_plane.py --quick

# The proofs have each fourth of these, with three kills.
corpus: $(DEV) ## loops that write behind the engine's back, each killed ten times (25 minutes)
	FLYBALL_CORPUS=all $(PYTEST) --dist load -m proof tests/capture_corpus $(AGAIN)

# On a real RDMA stack: two virtual machines, each with a Soft-RoCE device, are two hosts. Without qemu or apt it says so.
RDMA_VM = $(BIN)/python deploy/rdma_vm.py --boot-deadline-s 300
RDMA_BESIDE = --beside '$(BIN)/python tests/rdma/other_host.py'
RDMA_PYTEST = $(BIN)/python -m pytest --confcutdir tests/rdma -p no:cacheprovider --durations 10
test-rdma: $(DEV) ## on a real RDMA stack in two virtual machines; needs qemu and apt, or says so (5 minutes)
	$(RDMA_VM) --vms 2 --nics 2 --deadline-s 1200 $(RDMA_BESIDE) -- $(RDMA_PYTEST) -m "rdma and not slow" tests/rdma
	$(RDMA_VM) --deadline-s 600 -- \
		$(BIN)/python -m pytest -m rdma tests/conformance/test_engine_transports.py -q -p no:cacheprovider

# A hundred kills of engines in the middle of replication, of which `make test-rdma` has a few; ports and devices that go
# and come back, which the engine sees within a minute.
KILLS ?= 100
test-rdma-faults: $(DEV) ## the same, longer: a hundred random kills, ports that go and come back (an hour)
	$(RDMA_VM) --vms 2 --nics 2 --deadline-s 3600 $(RDMA_BESIDE) -- env FLYBALL_RDMA_KILLS=$(KILLS) \
		$(RDMA_PYTEST) -m rdma -s tests/rdma/test_random_kills.py tests/rdma/test_lost_port.py

# Pictures of the dashboard, of a real job whose worker is killed, and the one that the README shows.
pictures: $(DEV) ## pictures of the dashboard, for the README (1 minute)
	$(BIN)/pytest -q tests/browser/test_live_job.py
	@mkdir -p docs/pictures && cp .pictures/incident-light.png docs/pictures/dashboard.png

# A training job on three machines, of which one loses its power.
test-rdma-job: $(DEV) ## a training job in three virtual machines, of which one loses its power (10 minutes)
	$(RDMA_VM) --vms 3 --memory-mib 3072 --deadline-s 2700 $(RDMA_BESIDE) -- \
		$(RDMA_PYTEST) -m rdma -s tests/rdma/test_job_over_rdma.py

# Speed beside perftest, and cost beside TCP, in one machine. Prints a table, and JSON. Counts only if nothing else runs.
bench-rdma: $(DEV) ## speed beside perftest, in one virtual machine; counts only if nothing else runs (5 minutes)
	$(RDMA_VM) --deadline-s 600 -- $(BIN)/python benchmarks/rdma.py

# On an NVIDIA GPU, with a PyTorch that can use it: GPU_PYTHON=python3 for the one of this machine, which needs Flyball's
# dependencies and pytest.
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(DEV)) ## on an NVIDIA GPU; GPU_PYTHON=python3 for a Python that has torch for CUDA (2 minutes)
	$(GPU_PYTHON) -m pytest -m gpu tests/gpu -p no:cacheprovider --durations 10

# docker-compose.yml on a real container engine, which the test starts for itself and removes. Where it cannot, it says why.
test-compose: $(DEV) ## docker-compose.yml on a real container engine; needs root and Debian's docker.io (3 minutes)
	timeout --signal INT --kill-after 120 1500 $(BIN)/python -m pytest -m compose tests/compose -x -s -p no:cacheprovider --durations 5

# The adapters for other frameworks, with the frameworks themselves: their examples are killed, and go on.
test-integrations: $(INTEGRATIONS)/.done ## the adapters for frameworks, with those installed beside .venv (4 minutes)
	$(INTEGRATIONS)/bin/python -m pytest -m frameworks tests/frameworks -n 2 --dist load --durations 10 $(AGAIN)

# The reasons and messages that tests of the policy hear, kept beside the tests.
goldens: $(DEV) ## writes anew what tests of the policy hear it say; read the diff (1 minute)
	FLYBALL_GOLDENS=write $(BIN)/pytest -n 0 -q $$(grep -rlE --include '*.py' 'support.policy(.checked| import golden)' tests/unit)
	@git --no-pager diff --stat -- 'tests/unit/*/reasons/*'

# How strong the tests of the pure core are: mutmut changes it, and some test has to fail. Hours for all of it;
# `make mutants ONLY='services.rules.recovery_point*'` minutes for a module; SAMPLE=300 for an estimate of the score.
mutants: $(MUTANTS) ## mutation tests of the pure core: hours; SAMPLE=300 or ONLY='services.rules.*' for a part
ifdef SAMPLE
	$(BIN)/python deploy/mutation_score.py --sample $(SAMPLE) $(ONLY)
else
	$(BIN)/mutmut run $(ONLY)
	$(BIN)/mutmut results
endif

lint: $(DEV) ## ruff, mypy --strict, import-linter (1 minute)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Before each commit: ruff, the layers, the fast checks of the architecture. `git commit --no-verify` goes without.
hooks: $(DEV) ## have git run ruff and the architecture's checks before each commit
	git config core.hooksPath deploy/hooks

# The site of the documentation, in site/. A link or an anchor that leads nowhere is an error.
docs: $(DOCS)/.done ## the site of the documentation, in site/; a link that leads nowhere is an error (1 minute)
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --quiet --strict
	@echo "Written: site/index.html"

# A user's first hour, from the wheel: pip installs it, and all that it needs, into an environment outside the repository.
first-hour: $(DEV) ## a user's first hour: installs the wheel elsewhere with pip, then does what a new user does (4 minutes)
	FLYBALL_FIRST_HOUR_INSTALL=full $(BIN)/pytest -m first_hour tests/first_hour -n 2 --dist load $(AGAIN)

wheel: $(RUNTIME) ## dist/flyball-*.whl
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

setup: $(DEV) ## the environment for developers, in .venv (1 minute)
$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) deploy/set_up_venv.py $(VENV)
	@touch $@

$(EXAMPLES): $(RUNTIME)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[examples]'
	@touch $@

$(MUTANTS): $(DEV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[mutants]'
	@touch $@

$(DEV): pyproject.toml constraints.txt
	@$(PYTHON) deploy/set_up_venv.py $(VENV) --dev
	@touch $(RUNTIME) $@

$(INTEGRATIONS)/.done: $(DEV) tests/frameworks/without_dependencies.txt
	@$(PYTHON) deploy/set_up_venv.py $(INTEGRATIONS) --over $(VENV) --extra integrations \
		--no-deps tests/frameworks/without_dependencies.txt
	@touch $@

$(DOCS)/.done: $(RUNTIME)
	@$(PYTHON) deploy/set_up_venv.py $(DOCS) --over $(VENV) --extra docs
	@touch $@

clean: ## removes the environments and what tools left
	rm -rf $(VENV) $(INTEGRATIONS) $(DOCS) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache mutants
