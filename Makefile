#: Softmax at the Speed of Memory
#:
#:   make lab      open the course in JupyterLab, on chapter 1
#:   make test     prove everything: unit tests, and every notebook cell by cell
#:   make book     build the HTML book, strictly, into _build/html
#:   make lint     check the style of code and notebooks
#:   make record   on a GPU: execute every notebook in place and record what it measures
#:   make bench    on a GPU: measure the benchmark of chapter 13, peers beside it
#:
#: Each target makes what it needs in .venv (Python 3.11 or newer) and keeps it up to date.
#: ARGS="..."                 goes to JupyterLab or pytest:  make lab ARGS=--no-browser
#: PYTHON=/path/to/python     uses that interpreter as it is and installs nothing
#: BASE_PYTHON=python3.12     makes .venv with that Python instead of python3

BASE_PYTHON ?= python3
PY := $(or $(PYTHON),.venv/bin/python)
READY := $(if $(PYTHON),check-python,.venv/.ready)
SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))

# Notebook kernels find the course through PYTHONPATH, installed or not.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help lab test book lint record bench check-python
help:
	@sed -n 's/^#: \{0,1\}//p' Makefile

lab: $(READY)
	$(PY) -m jupyterlab --LabApp.default_url=/lab/tree/notebooks/01_eager.ipynb $(ARGS)

test: $(READY)
	$(PY) -m pytest $(ARGS)

book: $(READY)
	$(PY) -m jupyter book build . --all -W -n --keep-going

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# The commit that rows are recorded under: asked for before anything is rewritten.
COMMIT = $(or $(COURSE_COMMIT),$(shell git describe --always --dirty 2>/dev/null || echo unknown))
record: $(READY)
	@$(PY) -c 'import sys; from kernels.lab import backend; sys.exit(backend.INTERPRETED)' || \
	  { echo 'make record needs an NVIDIA GPU and finds none (or TRITON_INTERPRET=1 is set): run it on a machine that has one' >&2; exit 1; }
	find notebooks/recorded -name '*.csv' ! -name 'fastest*' -delete
	COURSE_RECORD=1 COURSE_COMMIT=$(COMMIT) $(PY) -m nbconvert --to notebook --execute --inplace \
	  --ExecutePreprocessor.record_timing=False notebooks/*.ipynb
	COURSE_RECORD=1 COURSE_COMMIT=$(COMMIT) $(PY) book/figures/ladder.py

bench: $(READY)
	COURSE_COMMIT=$(COMMIT) $(PY) benchmarks/fastest.py $(ARGS)

.venv/.ready: requirements.txt pyproject.toml
	@$(BASE_PYTHON) -c '$(SUPPORTED)' 2>/dev/null || \
	  { echo 'Python 3.11 or newer is needed, and $(BASE_PYTHON) is not that: install one, then say e.g. make $(MAKECMDGOALS) BASE_PYTHON=python3.12' >&2; exit 1; }
	@echo 'Setting up .venv: downloading and installing PyTorch, Triton and Jupyter (once; some minutes) ...'
	@$(BASE_PYTHON) -m venv .venv >/dev/null || \
	  { echo '$(BASE_PYTHON) cannot make a virtual environment: install its venv module (Debian, Ubuntu: sudo apt install python3-venv) and try again' >&2; exit 1; }
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt && \
	  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . || \
	  { echo 'The installation failed, see above: check the network, the free disk space and that PyTorch supports this Python, then try again' >&2; exit 1; }
	@touch $@

check-python:
	@$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || \
	  { echo 'Python 3.11 or newer is needed, and PYTHON=$(PYTHON) is not that: name another one, or leave PYTHON out' >&2; exit 1; }
	@$(PYTHON) -c 'import torch, triton, nbval' 2>/dev/null || \
	  { echo 'PYTHON=$(PYTHON) cannot import torch, triton and nbval: install requirements.txt there, or leave PYTHON out' >&2; exit 1; }
