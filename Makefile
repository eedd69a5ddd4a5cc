# Everything that one does with this project, on a machine with make and Python >= 3.10.
#
#   make train    a small GPT on real text, on RANKS ranks: checkpoint, curve, sample, summary in runs/readme
#                 (goes on where it stopped; make train TRAIN=--restart begins anew)
#   make test     every test        make lint    style, types, layers        make doctor    what each rank sees
#   make bench    every table; make bench-step, bench-collectives, bench-zero, bench-pipeline: one
#
# The environment (.venv) is made on the first call and renewed when setup.cfg or constraints.txt change. Where torch's
# build with CUDA is not wanted:  make setup PIP="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP ?=
RANKS ?= 2
TRAIN ?= --resume auto

BIN := .venv/bin
STAMP := .venv/set-up
# The same mpi4py runs on either library; both wheels have a bin/mpirun, so the second one has a place of its own.
MPICH := .venv-mpich
CORES := $(shell nproc 2>/dev/null || echo 1)

export PATH := $(CURDIR)/$(BIN):$(PATH)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1

# $(call mpirun,N): Open MPI on N ranks. --oversubscribe alone would leave ranks unbound: they wander between cores.
bind = $(if $(filter 1,$(shell [ $(1) -le $(CORES) ] && echo 1)),--bind-to core:overload-allowed:if-supported)
# Each start has its own folder for the launcher's files: a killed mpirun leaves them, and Open MPI's refuses to start
# where it finds those of an earlier one with its own process number.
own_tmp = own=$$(mktemp -d) && trap 'rm -rf "$$own"' EXIT && TMPDIR=$$own
mpirun = $(own_tmp) mpirun --oversubscribe $(call bind,$(1)) -n $(1)
mpich = $(own_tmp) LD_LIBRARY_PATH=$(CURDIR)/$(MPICH)/lib MPI4PY_MPIABI=mpich $(MPICH)/bin/mpirun -n $(1)
BENCHES := bench-collectives bench-step bench-zero bench-optimizer bench-offload bench-pipeline

.PHONY: help setup train test test-unit test-mpi test-mpich test-jobs lint doctor bench clean $(BENCHES)

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt $(PIP) -e '.[mpi,torch,plot,dev]'
	touch $@

$(MPICH)/bin/mpirun: constraints.txt | $(STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps --ignore-installed --prefix $(MPICH) mpich
	touch $@

runs/readme/data.h5: | $(STAMP)
	hpctrain data prepare --out $@ --python-stdlib --limit-mib 6

train: $(STAMP) runs/readme/data.h5
	$(call mpirun,$(RANKS)) hpctrain train scripts/train_gpt.toml $(TRAIN)

test: test-unit test-mpi test-mpich test-jobs

test-unit: $(STAMP)
	python -m pytest tests/unit tests/threads tests/contract

test-mpi test-mpich: export OMP_NUM_THREADS := 1

test-mpi: $(STAMP)
	$(call mpirun,1) python -m pytest tests/mpi
	$(call mpirun,2) python -m pytest tests/mpi tests/contract
	$(call mpirun,3) python -m pytest tests/mpi tests/contract
	$(call mpirun,4) python -m pytest tests/mpi tests/contract

test-mpich: $(STAMP) $(MPICH)/bin/mpirun
	$(call mpich,2) python -m pytest tests/mpi tests/contract
	$(call mpich,3) python -m pytest tests/mpi tests/contract

test-jobs: $(STAMP)
	python -m pytest tests/jobs

lint: $(STAMP)
	ruff check .
	mypy
	lint-imports --no-cache --no-logo --config setup.cfg

doctor: $(STAMP)
	$(call mpirun,$(RANKS)) hpctrain doctor

bench: $(BENCHES)

bench-collectives: $(MPICH)/bin/mpirun

$(BENCHES): bench-%: $(STAMP)
	python bench/$*.py

# Caches and benchmark tables; runs/ holds your results and stays.
clean:
	rm -rf build .mypy_cache .ruff_cache .import_linter_cache .hypothesis .pytest_cache
	find hpctrain tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} +
