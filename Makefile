# Every target brings its own virtual environment: `make demo` works in a fresh clone.
#
#   PYTHON   the interpreter that creates the environment   (default: python3)
#   VENV     where the environment lives                    (default: .venv)
#   ARGS     further arguments for the command of a target  (default: none)

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SPARSE := $(VENV)-sparse
TRITON := $(VENV)-triton

# OpenMP's threads spin while they wait, and on a busy machine they then wait for the
# very core they spin on: training gets ten times slower. Not for `bench`, whose times
# should be those of PyTorch as it comes.
demo docs test coverage test-sparse test-triton smoke: export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help install demo test coverage test-sparse test-triton test-gpu lint format docs bench bench-gpu results smoke clean
.DELETE_ON_ERROR:

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' \
		$(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  PYTHON=python3.12 picks the interpreter, ARGS='...' adds arguments:"
	@echo "  make test ARGS='tests/ops -x', make demo ARGS='--help'"

install: $(STAMP)  ## create the virtual environment (the others do it too)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check \
		--constraint constraints.txt --editable '.[examples,docs,dev]'
	@touch $@

# An environment that sees all that the other one has.
define overlay
	$(BIN)/python -m venv --clear $(1)
	$(BIN)/python -c "import site; print('import site; site.addsitedir(%r)' \
		% site.getsitepackages()[0])" > "$$($(1)/bin/python -c \
		'import site; print(site.getsitepackages()[0])')/base.pth"
endef

demo: $(STAMP)  ## train a small model on generated peptides (no download)
	$(BIN)/python examples/lrgb.py --preset demo \
		$(or $(ARGS),--overwrite)
	$(if $(ARGS),,@echo 'A model with Chimera layers learned six properties of peptides that depend' \
		'on distant atoms: see runs/lrgb/generated-chimera-demo-seed0/curves.png')

# A process and a thread for each core.
PARALLEL := --numprocesses=logical --maxprocesses=8 --dist=worksteal
test coverage test-triton smoke: export OMP_NUM_THREADS = 1
test coverage test-triton smoke: export MKL_NUM_THREADS = 1
test coverage test-triton smoke: export OPENBLAS_NUM_THREADS = 1

test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

coverage: $(STAMP)  ## run the tests, and fail if they run fewer lines than they did
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=term $(ARGS)

test-sparse: $(SPARSE)/.installed  ## build torch-scatter and torch-sparse, run what needs them
	$(SPARSE)/bin/python -m pytest -rs -k "sparse or neighbour" \
		tests/nn/conv/test_all_convs.py tests/nn/conv/test_chimera_conv.py $(ARGS)

# There are no wheels of the two for most versions of PyTorch. They are built for the one
# that is installed, in an environment of their own that sees all that the other one has.
$(SPARSE)/.installed: $(STAMP)
	$(call overlay,$(SPARSE))
	$(SPARSE)/bin/python -m pip install --disable-pip-version-check \
		--upgrade 'setuptools>=77.0.3' wheel
	FORCE_ONLY_CPU=1 $(SPARSE)/bin/python -m pip install --disable-pip-version-check \
		--no-build-isolation --no-deps torch-scatter torch-sparse
	@touch $@

test-triton: $(TRITON)/.installed  ## run Triton's kernels in its interpreter, compile them
	TRITON_INTERPRET=1 $(TRITON)/bin/python -m pytest $(PARALLEL) -rs \
		tests/ops/test_triton_interpreted.py tests/ops/test_triton_launches.py \
		tests/ops/test_triton_gated_norm.py tests/ops/test_triton_edge_softmax.py \
		tests/ops/common/test_static_tables.py \
		tests/ops/common/test_triton_runtime.py tests/ops/common/test_verdicts.py $(ARGS)
	TRITON_INTERPRET=1 $(TRITON)/bin/python -m pytest $(PARALLEL) \
		tests/ops/test_host_waits.py tests/ops/test_operators.py \
		tests/ops/recurrence/test_channel_scan.py tests/benchmarks/test_operations.py \
		-k "triton and not (random_batches or derivatives or dtypes)" $(ARGS)
	$(TRITON)/bin/python -m pytest $(PARALLEL) -rs tests/ops/test_triton_compiled.py $(ARGS)

# Builds of PyTorch for CPUs come without Triton. It is installed in an environment of its
# own that sees all that the other one has, as its interpreter is a matter of tests.
$(TRITON)/.installed: $(STAMP)
	$(call overlay,$(TRITON))
	$(TRITON)/bin/python -m pip install --disable-pip-version-check --no-deps 'triton==3.9.*'
	@touch $@

test-gpu: $(STAMP)  ## run what needs a GPU (and a PyTorch for it)
	$(BIN)/python -c "import torch; assert torch.cuda.is_available(), 'there is no GPU'"
	$(BIN)/python -m pytest -rs -m cuda $(ARGS)

lint: $(STAMP)  ## check style and types
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP)  ## rewrite the sources in the project's style
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

docs: $(STAMP)  ## build the documentation into docs/_build/html
	rm -rf docs/_build docs/generated
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html $(ARGS)

bench: $(STAMP)  ## measure layers beside what one would use instead
	$(BIN)/python benchmarks/layers.py $(ARGS)

bench-gpu: $(STAMP)  ## measure layers, then operators, on a GPU
	$(BIN)/python benchmarks/layers.py --device cuda $(ARGS)
	$(BIN)/python benchmarks/gpu.py $(ARGS)

results:  ## list the commands that made the figures of the documentation
	@$(PYTHON) benchmarks/commands.py

smoke: $(STAMP)  ## run every example and benchmark for a few seconds
	$(BIN)/python -m pytest $(PARALLEL) tests/smoke.py $(ARGS)

clean:  ## remove what was built, the virtual environment too
	rm -rf $(VENV) $(SPARSE) $(TRITON) build dist docs/_build docs/generated ./*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
