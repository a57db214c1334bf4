# Every target sets up its own environment; the second time it is there already.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 4
RUNTIME := $(VENV)/.runtime
DEV     := $(VENV)/.dev
MUTANTS := $(VENV)/.mutants

.PHONY: demo test test-fast proofs mutants lint first-hour setup wheel clean
.DEFAULT_GOAL := demo

# What users need, and no tool of the developers.
demo: $(RUNTIME)
	@$(BIN)/flyball demo

test: $(DEV)
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 5

# Whole clusters whose processes, services and databases are killed; the demo; the benchmarks at their smallest.
proofs: $(DEV)
	$(BIN)/pytest -m proof tests/integration -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 10 --durations-min 5

# For every save of a file: no processes, no databases, no properties.
test-fast: $(DEV)
	$(BIN)/pytest tests/unit -m "not real_time" -n 2 -q

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

# A user's first hour, from the wheel: pip installs it, and all that it needs, into an environment outside the repository.
first-hour: $(DEV)
	FLYBALL_FIRST_HOUR_INSTALL=full $(BIN)/pytest -m first_hour tests/first_hour -n 2 --dist load

wheel: $(RUNTIME)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

setup: $(DEV)

$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) deploy/set_up_venv.py $(VENV)
	@touch $@

$(MUTANTS): $(DEV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[mutants]'
	@touch $@

$(DEV): pyproject.toml constraints.txt
	@$(PYTHON) deploy/set_up_venv.py $(VENV) --dev
	@touch $(RUNTIME) $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache mutants
