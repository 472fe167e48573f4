#: Softmax at the Speed of Memory
#:
#:   make lab      open the course in JupyterLab, on chapter 1
#:   make test     prove the course: unit tests, and every notebook cell by cell
#:   make test-all the same with all tests, also those that compile for every kind of GPU
#:   make book     build the HTML book, strictly, into _build/html
#:   make browser  look at every page of the book in Chromium, if there is one
#:   make browser-lab  run every notebook in JupyterLab in Chromium
#:   make slides   write the slides of each part into _build/slides
#:   make lint     check the style of code and notebooks
#:   make record   on a GPU: execute every notebook in place and record what it measures
#:   make exercises  write notebooks/exercises from notebooks/solutions
#:   make record-all  on one or more GPUs: that, the benchmark and its controls, at one commit
#:   make bench    on a GPU: measure the benchmark of chapter 18, peers beside it
#:   make hub      start a classroom: JupyterHub on this machine, a login per learner
#:   make hub-test prove the classroom: two learners run a chapter at once
#:   make pairs    make test on several pairs of PyTorch and Triton (downloads each)
#:   make fresh    open a notebook alone, in a new environment (downloads PyTorch)
#:   make address  change the repository's address everywhere: URL=... REVISION=...
#:
#: Each target makes what it needs in .venv (Python 3.11 or newer) and keeps it up to date.
#: ARGS="..."                 goes to JupyterLab, pytest or the benchmark:
#:                            make lab ARGS=--no-browser
#: PYTHON=/path/to/python     uses that interpreter as it is and installs nothing
#: BASE_PYTHON=python3.12     makes .venv with that Python instead of python3
#: PAIRS="2.13+3.9.0 ..."     the pairs that make pairs tries, PyTorch+Triton

BASE_PYTHON ?= python3
PY := $(or $(PYTHON),.venv/bin/python)
SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))
PAIRS ?= 2.10+3.6.0 2.11+3.6.0 2.13+3.7.1 2.13+3.9.0 2.15+3.9.0

# An environment of the learner's own needs only what the target uses: groups of
# pyproject.toml, or packages.
ready = $(if $(PYTHON),check-$(1),.venv/.ready)
BROWSER := $(if $(PYTHON),,.venv/.browser)
HUB := $(if $(PYTHON),,.venv/.hub)
needs-lab := run lab
needs-test := run test
needs-book := run book
needs-browser := run lab test
needs-slides := book slides
needs-lint := ruff
needs-record := run lab
needs-bench := run
needs-exercises := lab
needs-hub := run lab jupyterhub

# Notebook kernels find the course through PYTHONPATH, installed or not.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export BASE_PYTHON ARGS

.PHONY: help lab test test-all book browser browser-lab slides lint record record-all bench exercises hub hub-test pairs fresh address
help:
	@sed -n 's/^#: \{0,1\}//p' Makefile

lab: $(call ready,lab)
	$(PY) -m jupyterlab --LabApp.default_url=/lab/tree/notebooks/01_eager.ipynb \
		--LabApp.extra_labextensions_path=book/labextensions $(ARGS)

test: $(call ready,test)
	$(PY) -m pytest -m "not thorough" $(ARGS)

test-all: $(call ready,test)
	$(PY) -m pytest $(ARGS)

# Pages of former names would stay in the folder.
book: $(call ready,book)
	rm -rf _build/html
	$(PY) -m jupyter book build . --all -W -n --keep-going

# Where Playwright or Chromium is missing, the tests are skipped, and say so.
browser: book $(call ready,browser) $(BROWSER)
	$(PY) -m pytest -n 0 tests/browser --ignore=tests/browser/test_lab.py $(ARGS)

browser-lab: $(call ready,browser) $(BROWSER)
	$(PY) -m pytest -n 0 -s tests/browser/test_lab.py $(ARGS)

slides: $(call ready,slides)
	$(PY) .ci/slides.py

lint: $(call ready,lint)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# The commit that rows are recorded under: asked for before anything is rewritten.
# What recording itself rewrites does not make the commit dirty.
COMMIT = $(or $(COURSE_COMMIT),$(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)$(shell \
	  git status --porcelain -uno -- . ':!notebooks' 2>/dev/null | grep -q . && echo -dirty))
# Of this GPU's record, what `make bench` measured stays; the notebooks measure the rest anew.
BENCHMARKS = fastest.csv fastest_absent.csv fastest_peers.csv fastest_classes.csv flush.csv flush_dram.csv
NEEDS_GPU = @$(PY) -c 'import sys; from kernels.lab import backend; sys.exit(backend.INTERPRETED)' || \
	  { echo 'make $@ needs an NVIDIA GPU and finds none (or TRITON_INTERPRET=1 is set): run it on a machine that has one' >&2; exit 1; }
# A stream is flushed in pieces: the second nbconvert makes it one output again.
record: $(call ready,record)
	$(NEEDS_GPU)
	folder=$$($(PY) -c 'from kernels.lab import record; print(record.folder())') && mkdir -p $$folder && \
	  find $$folder -name '*.csv' $(BENCHMARKS:%=! -name '%') -delete
	COURSE_RECORD=1 COURSE_COMMIT=$(COMMIT) $(PY) -m nbconvert --to notebook --execute --inplace \
	  --ExecutePreprocessor.record_timing=False notebooks/*.ipynb
	$(PY) -m nbconvert --to notebook --inplace --coalesce-streams notebooks/*.ipynb
	COURSE_RECORD=1 COURSE_COMMIT=$(COMMIT) $(PY) book/figures/ladder.py

record-all: $(call ready,record)
	$(NEEDS_GPU)
	COURSE_COMMIT=$(COMMIT) $(PY) .ci/record.py $(ARGS)

bench: $(call ready,bench)
	$(NEEDS_GPU)
	COURSE_COMMIT=$(COMMIT) $(PY) -m benchmarks.fastest $(ARGS)
	COURSE_COMMIT=$(COMMIT) $(PY) -m benchmarks.classes
	COURSE_COMMIT=$(COMMIT) $(PY) -m benchmarks.flush
	$(PY) -m benchmarks.fastest --report

hub: $(call ready,hub) $(HUB)
	$(PY) -m jupyterhub -f hub/jupyterhub_config.py $(ARGS)

hub-test: $(call ready,test) $(call ready,hub) $(HUB)
	COURSE_HUB_TEST=1 $(PY) -m pytest -n 0 tests/test_hub.py $(ARGS)

exercises: $(call ready,exercises)
	$(PY) .ci/exercises.py $(ARGS)

pairs:
	@.ci/pairs $(PAIRS)

fresh: $(call ready,test)
	COURSE_FRESH=1 $(PY) -m pytest -n 0 tests/test_open.py $(ARGS)

address:
	@$(BASE_PYTHON) .ci/address.py '$(URL)' '$(REVISION)'

# pip would compile on one core. Some packages hold files that do not compile.
.venv/.ready: requirements.txt pyproject.toml
	@$(BASE_PYTHON) -c '$(SUPPORTED)' 2>/dev/null || \
	  { echo 'Python 3.11 or newer is needed, and $(BASE_PYTHON) is not that: install one, then say e.g. make $(MAKECMDGOALS) BASE_PYTHON=python3.12' >&2; exit 1; }
	@echo 'Setting up .venv: downloading and installing PyTorch, Triton and Jupyter (once; some minutes) ...'
	@$(BASE_PYTHON) -m venv .venv >/dev/null || \
	  { echo '$(BASE_PYTHON) cannot make a virtual environment: install its venv module (Debian, Ubuntu: sudo apt install python3-venv) and try again' >&2; exit 1; }
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt && \
	  { .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true; } && \
	  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . || \
	  { echo 'The installation failed, see above: check the network, the free disk space and that PyTorch supports this Python, then try again' >&2; exit 1; }
	@touch $@

# What only the browser tests need: Playwright, which drives Chromium, and axe-core.
.venv/.browser: .venv/.ready
	@echo 'Adding Playwright and axe-core to .venv (once) ...'
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[browser]' || \
	  { echo 'The installation failed, see above: check the network and the free disk space, then try again' >&2; exit 1; }
	@touch $@

# What only the classroom needs: JupyterHub, Node, and the proxy, which npm installs.
.venv/.hub: .venv/.ready
	@echo 'Adding JupyterHub, Node and the proxy to .venv (once) ...'
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[hub]' && \
	  PATH="$(CURDIR)/.venv/bin:$$PATH" npm install --global --prefix .venv --silent configurable-http-proxy@5 || \
	  { echo 'The installation failed, see above: check the network and the free disk space, then try again' >&2; exit 1; }
	@touch $@

check-%:
	@$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || \
	  { echo 'Python 3.11 or newer is needed, and PYTHON=$(PYTHON) is not that: name another one, or leave PYTHON out' >&2; exit 1; }
	@$(PYTHON) .ci/check_python.py $(needs-$*)
