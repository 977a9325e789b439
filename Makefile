# Every target does its own set-up: git, make, Python >= 3.11 and a package registry are enough.

UV_VERSION := 0.13.8
PACKAGES := gt-config gt-trace gt-passes gt-pipeline gt-autoparallel gt-trainer
TORCH_ONLY := gt-trace gt-passes gt-pipeline
TORCH ?= 2.15.0
NUM_CASES ?= 2000
SEED ?= 0
# Without those that need a GPU: `make bench BENCH=gpu_step`.
BENCH ?= $(filter-out gpu_step gpu_operators training_run,$(patsubst benchmarks/bench_%.py,%,$(sort $(wildcard benchmarks/bench_*.py))))
ARGS ?=

# The first Python >= 3.11 on PATH; `make PYTHON=... train` names another.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$python; break; }; done)

BIN := .venv/bin
STAMP := .venv/.installed
TORCHAO := .torchao
TORCHAO_STAMP := $(TORCHAO)/.installed

.PHONY: help train test test-all test-gpu check check-ruff check-types check-layers check-dependencies \
	check-workspace check-docs docs format build smoke release bench fuzz fuzz-edits test-torch clean

help:
	@echo 'make train       train the Llama 3 debug model as a captured graph (ARGS=... to gt-train)'
	@echo 'make test        every test but the slow ones (ARGS=... to pytest)'
	@echo 'make test-all    every test'
	@echo 'make test-gpu    what only a GPU can prove (ARGS=... to pytest); skipped with a reason without one'
	@echo 'make check       ruff, mypy --strict, import layers, dependencies, workspace metadata, the site'
	@echo 'make docs        the documentation as a site in outputs/site, from the programs that tests run'
	@echo 'make format      let ruff format and fix, and copy programs into the pages that show them'
	@echo 'make build       wheels and source distributions of all packages in dist/'
	@echo 'make smoke       each wheel passes its own tests in a fresh environment'
	@echo 'make release     date, build, smoke, commit and tag what is unreleased (ARGS=--dry-run to see what)'
	@echo 'make test-torch  torch-only packages against TORCH=2.11.0, 2.12.1, ... 2.15.0'
	@echo 'make fuzz        NUM_CASES=2000 random steps x random passes, from SEED=0, compared to the bit;'
	@echo '                 and as many random steps, captured, compared to eager ones'
	@echo 'make fuzz-edits  NUM_CASES=2000 random edits of captured steps, from SEED=0: accepted means equal'
	@echo 'make bench       benchmarks, results in outputs/bench/ (BENCH=name for one)'
	@echo 'make clean       remove environments, caches and builds'

$(STAMP): pyproject.toml $(PACKAGES:%=packages/%/pyproject.toml) Makefile
	@test -n "$(PYTHON)" || { echo 'No Python >= 3.11 on PATH; name one: make PYTHON=...' >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv \
		|| { echo 'Cannot create .venv; on Debian and Ubuntu, install python3-venv.' >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --group dev \
		$(PACKAGES:%=--editable packages/%)
	$(BIN)/python -m compileall -q $(PACKAGES:%=packages/%/src)
	@touch $@

# Not in .venv: what is said where it is missing has tests too, and each start would import it.
$(TORCHAO_STAMP): $(STAMP)
	$(BIN)/uv pip install --quiet --no-deps --python $(BIN)/python --target $(TORCHAO) --group float8
	@touch $@

train: $(STAMP)
	$(BIN)/gt-train $(ARGS)

# One thread for each of the processes that a distributed test starts. Runs of their own, since each has
# one server that worker processes are forked from: one knows torch alone, the next torchtitan too, the
# last torchao as well.
# Most tests keep one core busy, so two run side by side, a file in one process; those of several ranks
# (`--ranks` of tests-integration/conftest.py tells them) alone. `ARGS="-n 0"` for one process, as pdb needs.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
TWO_AT_A_TIME := -n 2 --dist loadfile
QUANTIZATION := tests-integration/quantization
INTEGRATION := tests-integration --ignore $(QUANTIZATION)
WITH_TORCHAO := $(QUANTIZATION) tests-integration/gpu/test_float8.py
QUANTIZATION_PYTEST := PYTHONPATH=$(CURDIR)/$(TORCHAO) $(PYTEST)

test: $(STAMP) $(TORCHAO_STAMP)
	@status=0; \
	$(PYTEST) $(TWO_AT_A_TIME) -m 'not slow' packages tools $(ARGS) || status=1; \
	$(PYTEST) $(TWO_AT_A_TIME) -m 'not slow' --ranks one $(INTEGRATION) $(ARGS) || status=1; \
	$(PYTEST) -m 'not slow' --ranks several $(INTEGRATION) $(ARGS) || status=1; \
	$(QUANTIZATION_PYTEST) -m 'not slow' $(WITH_TORCHAO) $(ARGS) || status=1; \
	exit $$status

test-all: $(STAMP) $(TORCHAO_STAMP)
	@status=0; \
	$(PYTEST) $(TWO_AT_A_TIME) packages tools $(ARGS) || status=1; \
	$(PYTEST) $(TWO_AT_A_TIME) --ranks one $(INTEGRATION) $(ARGS) || status=1; \
	$(PYTEST) --ranks several $(INTEGRATION) $(ARGS) || status=1; \
	$(QUANTIZATION_PYTEST) $(WITH_TORCHAO) $(ARGS) || status=1; \
	exit $$status

# The folder has a pytest.ini of its own and needs only torch, pytest and our sources: tests-integration/README.md.
test-gpu: $(STAMP) $(TORCHAO_STAMP)
	PYTHONPATH=$(CURDIR)/$(TORCHAO) $(BIN)/python -m pytest tests-integration/gpu $(ARGS)

# `make --keep-going check` reports what every tool found.
check: check-ruff check-types check-layers check-dependencies check-workspace check-docs

check-ruff: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# Once per package: each must be well typed as its users see it, through its siblings' py.typed.
check-types: $(STAMP)
	@status=0; for package in $(PACKAGES); do \
		echo "mypy --strict $$package"; \
		$(BIN)/mypy --strict packages/$$package/src || status=1; \
	done; \
	echo 'mypy --strict tools'; $(BIN)/mypy --strict tools/*.py || status=1; exit $$status

check-layers: $(STAMP)
	$(BIN)/lint-imports

check-dependencies: $(STAMP)
	@status=0; for package in $(PACKAGES); do \
		echo "deptry $$package"; \
		(cd packages/$$package && ../../$(BIN)/deptry --no-ansi src) || status=1; \
	done; exit $$status

check-workspace: $(STAMP)
	$(BIN)/python tools/check_workspace.py

# Without a network: fonts and scripts come with the theme.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check-docs: $(STAMP)
	@site=$$(mktemp -d); $(MKDOCS) --site-dir $$site; status=$$?; rm -rf $$site; exit $$status

docs: $(STAMP)
	$(MKDOCS)
	@echo outputs/site/index.html

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python tools/page_programs.py

build: $(STAMP)
	rm -rf dist
	$(BIN)/uv build --quiet --all-packages --out-dir dist
	@ls dist

smoke: build
	$(BIN)/python tools/smoke.py --uv $(BIN)/uv $(ARGS)

release: $(STAMP)
	$(BIN)/python tools/release.py --uv $(BIN)/uv $(ARGS)

test-torch: $(STAMP)
	@status=0; for package in $(TORCH_ONLY); do \
		echo "$$package, torch $(TORCH)"; \
		(cd packages/$$package && OMP_NUM_THREADS=1 HATCH_DATA_DIR=$(CURDIR)/.hatch/data \
			HATCH_CACHE_DIR=$(CURDIR)/.hatch/cache HATCH_ENV_TYPE_VIRTUAL_UV_PATH=$(CURDIR)/$(BIN)/uv \
			$(CURDIR)/$(BIN)/hatch run torch.$(TORCH):test $(ARGS)) || status=1; \
	done; exit $$status

bench: $(STAMP)
	@mkdir -p outputs/bench
	@for name in $(BENCH); do \
		$(BIN)/python benchmarks/bench_$$name.py --json outputs/bench/$$name.json $(ARGS) || exit 1; \
	done

# Cases that fail are made small and stored in tests-integration/fuzz/regressions.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=tests-integration $(BIN)/python -m fuzz \
		--num-cases $(NUM_CASES) --seed $(SEED) $(ARGS)
	OMP_NUM_THREADS=1 PYTHONPATH=tests-integration $(BIN)/python -m fuzz.captures \
		--num-cases $(NUM_CASES) --seed $(SEED) $(ARGS)

fuzz-edits: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=packages/gt-passes/tests $(BIN)/python -m edit_campaign \
		--num-cases $(NUM_CASES) --seed $(SEED) $(ARGS)

clean:
	rm -rf .venv .torchao .hatch .smoke dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find packages tests-integration tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
