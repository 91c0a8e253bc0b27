# Every target creates or refreshes .venv by itself. `make help` lists them.
PYTHON      ?= python3
TORCH_INDEX ?=
PORT        ?= 8000
VENV        ?= .venv

BIN   := $(VENV)/bin
PY    := $(BIN)/python
READY := $(VENV)/.ready
TORCH := $(shell grep '^torch==' constraints.txt)
SITE  := _build/html
# `make test`: all of tests/lib, and of the other floors what takes seconds.
SOON   := tests/lib $(wildcard tests/book/test_mechanism_*.py) \
  $(addprefix tests/course/test_,check_edits.py check_slips.py check_stale.py solutions.py make_exercises.py) \
  $(addprefix tests/book/test_,book_formulas.py figures_svg.py figures_schedule.py promises.py prose.py) $(wildcard tests/book/test_explain*.py)
COURSE := $(filter-out $(SOON),$(wildcard tests/course/test_*.py))
PAGES  := $(filter-out $(SOON) $(wildcard tests/book/test_site*.py),$(wildcard tests/book/test_*.py))
SHARED := -m "not alone and not timed and not chapters" -n 2 --dist worksteal
ALONE  := -m "alone or timed"

# A kernel called python3 in the user's home must not stand in for the one in .venv.
export JUPYTER_PREFER_ENV_PATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1
# Where it is set, as in many containers, each of some thousand processes would compile lib anew.
unexport PYTHONDONTWRITEBYTECODE
# An environment elsewhere may have another checkout's lib (`tools/setup.sh`).
ifeq ($(filter $(realpath $(CURDIR))/%,$(or $(realpath $(VENV)),$(abspath $(VENV)))),)
export PYTHONPATH := $(CURDIR)
endif

.PHONY: help setup book students site pdf serve lab train test test-course test-book quick measured solutions thorough notebooks exercises exercise kills assignments lint bench soak fuzz hosts certificate nbgrader newest grading busy perturbed mutants repository colab evidence
.PHONY: screenshots cover clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

define HELP
six Six that suffice
read More for readers
write To change the book
check Before you send a change, as .ci/run and .ci/long do
long What takes a night
publish To publish
endef
export HELP

help: ## list the targets
	@echo "$$HELP" | while read -r group title; do \
	  echo "$$title"; sed -n "s/^\([a-z-]*\):.*## $$group: /  \1\t/p" Makefile | expand -t 15; echo; done
	@echo "PYTHON=python3.12         which Python makes .venv (3.11 or newer)"
	@echo "VENV=.venv-312            another environment, for another Python"
	@echo "TORCH_INDEX=URL           where torch comes from; https://download.pytorch.org/whl/cpu spares Linux gigabytes of CUDA"

setup: $(READY) ## six: create .venv with everything that is needed
	@echo "Ready: $(VENV)"

$(READY): FORCE
	@tools/setup.sh $(VENV) $(PYTHON) $(TORCH_INDEX)

FORCE:

ifdef CHAPTER
book: $(READY)
	@$(PY) tools/build_chapters.py $(CHAPTER)
else
book: $(READY) ## six: execute every chapter and build the pages; make book CHAPTER=03 takes one
	@$(PY) tools/notebooks.py --check
	@$(PY) tools/kills.py --check
	@echo "== Executing the chapters, three at a time, and building the pages (a few minutes)"
	@rm -rf _build && mkdir _build
	@start=$$(date +%s); export BOOK_CLAIMS=$(abspath _build/claims.jsonl); $(PY) tools/execute_chapters.py && \
	  $(BIN)/jupyter-book build . -W --keep-going && test -f $(SITE)/index.html && \
	  echo "== Built in $$(($$(date +%s) - start)) s: $(abspath $(SITE)/index.html)"
	@echo "   make serve shows it at http://localhost:$(PORT)"
endif

students: $(READY) ## read: build the pages without the solutions, into _build/student
	@$(PY) tools/student_site.py

site: $(READY) ## check: open every built page in a real browser and check it
	@test -f $(SITE)/index.html || { echo "There is no $(SITE) yet: make book" >&2; exit 1; }
	@SITE=$(abspath $(SITE)) $(PY) -m pytest tests/book/test_site*.py -n 2 --dist loadgroup
	@$(PY) tools/looks.py

pdf: $(READY) ## read: print the built book as one PDF, with bookmarks; says how many sheets a chapter takes
	@test -f $(SITE)/index.html || $(MAKE) book
	@$(PY) tools/make_pdf.py $(SITE) _build/parallel-by-hand.pdf

serve: $(READY) ## six: show the built book in a browser
	@test -f $(SITE)/index.html || $(MAKE) book
	@echo "The book is at http://localhost:$(PORT) (Ctrl-C ends it)"
	@$(PY) -m http.server $(PORT) --bind 127.0.0.1 --directory $(SITE) >/dev/null

lab: $(READY) ## six: open the notebooks in JupyterLab, which the first time installs
	@$(PY) -c 'import jupyterlab' 2>/dev/null || \
	  { echo "== Installing JupyterLab"; $(PY) -m pip install -q jupyterlab -c constraints.txt; }
	@$(PY) -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/chapters/00_start.ipynb $(ARGS)

train: $(READY) ## read: train the GPT from the command line: make train ARGS="--dp 2 --zero 1"
	@$(PY) -m lib.train $(ARGS)

test: quick measured solutions ## six: the tests of lib, what takes seconds of course and book, and the solutions against their outputs
	@$(PY) tools/browser.py

quick: $(READY)
	@echo "== Tests that may share the machine, two at a time"
	@$(PY) -m pytest $(SOON) $(SHARED) --part quick $(PYTEST_ARGS)

measured: $(READY)
	@echo "== Tests that measure time or memory, or press Ctrl-C: one at a time"
	@$(PY) -m pytest $(SOON) $(ALONE) --part quick $(PYTEST_ARGS)

test-course: $(READY) ## check: the other tests of course/: checks, grades, homeworks (minutes)
	@$(PY) -m pytest $(COURSE) $(SHARED) --part quick $(PYTEST_ARGS)
	@$(PY) -m pytest $(COURSE) $(ALONE) --part quick $(PYTEST_ARGS)

test-book: $(READY) ## check: the other tests of book/: figures, pages, the first cell (minutes)
	@$(PY) -m pytest $(PAGES) $(SHARED) --part quick $(PYTEST_ARGS)
	@$(PY) -m pytest $(PAGES) $(ALONE) --part quick $(PYTEST_ARGS) || test $$? = 5  # none was selected

solutions: $(READY)
	@echo "== Running the solutions again, two at a time: their outputs must come out the same"
	@CHECK_STRICT=1 $(PY) -m pytest --nbval --nbval-current-env --nbval-cell-timeout=120 -n 2 --dist loadfile \
	  --nbval-sanitize-with tests/nbval_sanitize.cfg solutions

thorough: $(READY) ## check: the tests that make test leaves out: more ranks, layouts and platforms (ten to fifteen minutes)
	@$(PY) -m pytest tests --ignore-glob 'tests/book/test_site*.py' $(SHARED) --part thorough --longest-s 60 $(PYTEST_ARGS)
	@$(PY) -m pytest tests --ignore-glob 'tests/book/test_site*.py' $(ALONE) --part thorough --longest-s 60 $(PYTEST_ARGS)

notebooks: $(READY) ## write: write every .ipynb from its .md, run the solutions, generate the exercises
	@$(PY) tools/museum.py
	@$(PY) tools/notebooks.py
	@$(PY) tools/execute_notebooks.py
	@if test -f tools/make_exercises.py; then $(PY) tools/make_exercises.py; fi

exercises: $(READY) ## write: generate the exercises from the solutions
	@$(PY) tools/make_exercises.py

exercise: $(READY) ## write: begin an exercise: make exercise ID=03.9 NAME=scaled_sum
	@$(PY) tools/new_exercise.py "$(ID)" $(if $(NAME),"$(NAME)")

kills: $(READY) ## write: judge the right and wrong programs of each exercise that changed (minutes for all), or of ID=03.9
	@$(PY) tools/kills.py $(ID)

assignments: $(READY) ## write: write the homeworks' handouts, rubrics and files for platforms; ASSIGNMENTS=~/course: your own
	@$(PY) -m course.release --assignments $(or $(ASSIGNMENTS),course/assignments) --out _build/assignments $(if $(ROSTER),--roster $(ROSTER)) $(if $(ROWS),--rows $(ROWS)) $(if $(CASES),--cases $(CASES))

lint: $(READY) ## six: check style, and that what is generated agrees with its source
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(PY) tools/museum.py --check
	@$(PY) tools/notebooks.py --check
	@if test -f tools/make_exercises.py; then $(PY) tools/make_exercises.py --check; fi
	@$(PY) tools/kills.py --check
	@$(PY) tools/evidence.py --check
	@$(PY) tools/prose.py --check

evidence: $(READY) ## write: how far the planner misses published runs: lib/planner/evidence.json
	@$(PY) tools/evidence.py

bench: $(READY) ## long: compare with PyTorch's own, on this machine
	@$(PY) -m benchmarks

hosts: $(READY) ## check: torchrun on two hosts, which are network namespaces of this machine; as root, with iproute2
	@$(PY) -m pytest tests/lib/test_two_hosts.py tests/lib/test_two_hosts_traffic.py tests/lib/test_two_hosts_doctor.py tests/lib/test_two_hosts_numbers.py -m hosts -q $(PYTEST_ARGS)

soak: $(READY) ## long: 500 runs of 4 ranks: nothing may grow (about two minutes)
	@SOAK_RUNS=500 $(PY) -m pytest tests/lib/test_soak.py -q

fuzz: $(READY) ## long: two random walks, over modules and over loops, each for FUZZ_S seconds (ten minutes)
	@FUZZ_S=$${FUZZ_S:-600} $(PY) -m pytest tests/lib/test_fuzz.py tests/lib/test_loops.py -k "twin or random" -q

certificate: $(READY) ## check: every layout of 1 to 8 ranks against one process, and its plan (minutes)
	@CERTIFICATE=all $(PY) -m pytest tests/lib/test_certificate.py tests/lib/test_plan.py -q

nbgrader: $(READY) ## long: grade with the real nbgrader, which the first time is installed into .venv-nbgrader (minutes)
	@test -x .venv-nbgrader/bin/nbgrader || \
	  { echo "== Installing nbgrader"; $(PYTHON) -m venv .venv-nbgrader && .venv-nbgrader/bin/pip install -q nbgrader==0.9.6; }
	@NBGRADER=$(abspath .venv-nbgrader/bin) $(PY) -m pytest tests/course/test_nbgrader.py -q

newest: ## long: run a chapter and an exercise with the packages of today, torch apart, in .venv-newest (minutes)
	@rm -rf .venv-newest && $(PYTHON) -m venv .venv-newest
	@.venv-newest/bin/pip install -q --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@.venv-newest/bin/pip install -q -r requirements.txt
	@.venv-newest/bin/python tools/newest.py

grading: $(READY) ## long: grade two hundred submissions, fifty of them hostile, as root (minutes)
	@GRADING=1 $(PY) -m pytest tests/course/test_grade_many.py -q

busy: $(READY) ## long: make book and make test beside endless loops and foreign traffic (nightly); CHAPTER="02 07": these alone
	@$(PY) tools/busy.py $(MAKE) book
	@$(if $(CHAPTER),,$(PY) tools/busy.py $(MAKE) test)

perturbed: $(READY) ## check: run the chapters with their counters 1% off: the claims must fail (about two minutes)
	@$(PY) -m pytest tests -m chapters -n 2 --dist worksteal $(PYTEST_ARGS)

mutants: $(READY) ## check: put each mistake of tests/mutants.txt into a copy of lib: its test must fail (minutes); MUTANTS="warmup": these alone
	@$(PY) tools/mutants.py $(MUTANTS)

repository: $(READY) ## publish: set the public address: make repository URL=https://github.com/ORG/REPO [BRANCH=v1.0.0]
	@$(PY) tools/set_repository.py "$(URL)" $(BRANCH)
	@$(PY) tools/notebooks.py
	@$(PY) tools/execute_notebooks.py
	@if test -f tools/make_exercises.py; then $(PY) tools/make_exercises.py; fi

colab: $(READY) ## read: write parallel-by-hand.zip, to be uploaded beside a notebook
	@$(PY) tools/make_colab_zip.py

screenshots: $(READY) ## publish: picture every built page, wide and narrow, light and dark
	@$(PY) tools/screenshots.py

cover: $(READY) ## publish: take the README's picture from the built book
	@$(PY) tools/screenshots.py --cover

clean: ## publish: remove what was built (.venv stays)
	rm -rf _build screenshots parallel-by-hand.zip .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
