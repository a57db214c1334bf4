# Every target sets up its own environment; the second time it is there already.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 4
# Options of pytest, e.g. AGAIN=--last-failed: only what failed the last time.
AGAIN  ?=
RUNTIME := $(VENV)/.runtime
DEV     := $(VENV)/.dev
MUTANTS := $(VENV)/.mutants
EXAMPLES := $(VENV)/.examples
# The frameworks that the adapters are for: in an environment of their own, over the one above.
INTEGRATIONS := $(VENV)-integrations
DOCS := $(VENV)-docs

.PHONY: demo demo-mnist test test-fast test-integrations test-rdma test-rdma-faults test-rdma-job bench-rdma test-gpu test-compose pictures proofs goldens mutants lint docs first-hour setup wheel clean
.DEFAULT_GOAL := demo

# What users need, and no tool of the developers.
demo: $(RUNTIME)
	@$(BIN)/flyball demo

# An ordinary script with flyball.save and flyball.load, killed again and again; on scikit-learn's digits.
demo-mnist: $(EXAMPLES)
	@$(BIN)/python examples/mnist_killed.py

test: $(DEV)
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 5 $(AGAIN)

# Whole clusters whose processes, services and databases are killed; the command line's flows from start to end; what
# `make test` has a part of: simulated clusters, kills, slot histories; the demo; the benchmarks at their smallest (those of
# DCP, of resharding, of trust and of goodput under faults with -m slow).
# "not slow" again, since pytest forgets the -m of pyproject.toml.
proofs: $(DEV)
	$(BIN)/pytest -m "proof and not slow" tests/integration tests/corruption tests/simulation tests/property -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 10 --durations-min 5 $(AGAIN)

# On a real RDMA stack: two virtual machines, each with a Soft-RoCE device, are two hosts. Without qemu or apt it says so.
RDMA_VM = $(BIN)/python deploy/rdma_vm.py --boot-deadline-s 300
RDMA_BESIDE = --beside '$(BIN)/python tests/rdma/other_host.py'
RDMA_PYTEST = $(BIN)/python -m pytest --confcutdir tests/rdma -p no:cacheprovider --durations 10
test-rdma: $(DEV)
	$(RDMA_VM) --vms 2 --nics 2 --deadline-s 1200 $(RDMA_BESIDE) -- $(RDMA_PYTEST) -m "rdma and not slow" tests/rdma
	$(RDMA_VM) --deadline-s 600 -- \
		$(BIN)/python -m pytest -m rdma tests/conformance/test_engine_transports.py -q -p no:cacheprovider

# A hundred kills of engines in the middle of replication, of which `make test-rdma` has a few; ports and devices that go
# and come back, which the engine sees within a minute.
KILLS ?= 100
test-rdma-faults: $(DEV)
	$(RDMA_VM) --vms 2 --nics 2 --deadline-s 3600 $(RDMA_BESIDE) -- env FLYBALL_RDMA_KILLS=$(KILLS) \
		$(RDMA_PYTEST) -m rdma -s tests/rdma/test_random_kills.py tests/rdma/test_lost_port.py

# Pictures of the dashboard, of a real job whose worker is killed, and the one that the README shows.
pictures: $(DEV)
	$(BIN)/pytest -q tests/browser/test_live_job.py
	@mkdir -p docs/pictures && cp .pictures/incident-light.png docs/pictures/dashboard.png

# A training job on three machines, of which one loses its power.
test-rdma-job: $(DEV)
	$(RDMA_VM) --vms 3 --memory-mib 3072 --deadline-s 2700 $(RDMA_BESIDE) -- \
		$(RDMA_PYTEST) -m rdma -s tests/rdma/test_job_over_rdma.py

# Speed beside perftest, and cost beside TCP, in one machine. Prints a table, and JSON. Counts only if nothing else runs.
bench-rdma: $(DEV)
	$(RDMA_VM) --deadline-s 600 -- $(BIN)/python benchmarks/rdma.py

# On an NVIDIA GPU, with a PyTorch that can use it: GPU_PYTHON=python3 for the one of this machine, which needs Flyball's
# dependencies and pytest.
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(DEV))
	$(GPU_PYTHON) -m pytest -m gpu tests/gpu -p no:cacheprovider --durations 10

# docker-compose.yml on a real container engine, which the test starts for itself and removes. Where it cannot, it says why.
test-compose: $(DEV)
	timeout --signal INT --kill-after 120 1500 $(BIN)/python -m pytest -m compose tests/compose -x -s -p no:cacheprovider --durations 5

# The adapters for other frameworks, with the frameworks themselves: their examples are killed, and go on.
test-integrations: $(INTEGRATIONS)/.done
	$(INTEGRATIONS)/bin/python -m pytest -m frameworks tests/frameworks -n 2 --dist load --durations 10 $(AGAIN)

# For every save of a file: no processes, no databases, no properties.
test-fast: $(DEV)
	$(BIN)/pytest tests/unit -m "not real_time" -n 2 -q

# The reasons and messages that tests of the policy hear, kept beside the tests: writes them anew. Read the diff.
goldens: $(DEV)
	FLYBALL_GOLDENS=write $(BIN)/pytest -n 0 -q $$(grep -rlE --include '*.py' 'support.policy(.checked| import golden)' tests/unit)
	@git --no-pager diff --stat -- 'tests/unit/*/reasons'

# How strong the tests of the pure core are: mutmut changes it, and some test has to fail. Hours for all of it;
# `make mutants ONLY='services.rules.recovery_point*'` minutes for a module; SAMPLE=300 for an estimate of the score.
mutants: $(MUTANTS)
ifdef SAMPLE
	$(BIN)/python deploy/mutation_score.py --sample $(SAMPLE) $(ONLY)
else
	$(BIN)/mutmut run $(ONLY)
	$(BIN)/mutmut results
endif

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site of the documentation, in site/. A link or an anchor that leads nowhere is an error.
docs: $(DOCS)/.done
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --quiet --strict
	@echo "Written: site/index.html"

# A user's first hour, from the wheel: pip installs it, and all that it needs, into an environment outside the repository.
first-hour: $(DEV)
	FLYBALL_FIRST_HOUR_INSTALL=full $(BIN)/pytest -m first_hour tests/first_hour -n 2 --dist load $(AGAIN)

wheel: $(RUNTIME)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

setup: $(DEV)

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

clean:
	rm -rf $(VENV) $(INTEGRATIONS) $(DOCS) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache mutants
