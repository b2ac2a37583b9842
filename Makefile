# What needs a virtual environment sets it up first, with no more than it needs; nothing else has to be installed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TEST := .venv/.ready-test
# Compiled on first use: much is never used.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --constraint constraints.txt --editable
REFERENCE := runs/h200
JOBS ?= 2
# Bytecode is kept, whatever the environment says: each run imports torch in a process of its own, and compiling
# it anew takes seconds every time.
export PYTHONDONTWRITEBYTECODE :=
LAB_FLAGS ?=

.PHONY: report reference-runs test lint slow-tests hooks lab lab-copies bench check reference doctor clean

report: $(READY)  ## measure this machine, in minutes, and render its report beside its runs
	$(BIN)/stepscope report

reference-runs: $(READY)  ## the whole matrix of all studies on a GPU (it says how long), and its report
	$(BIN)/stepscope sweep reference --runs runs/local-reference
	$(BIN)/stepscope render --runs runs/local-reference

# Lint, types and the committed report are tests, and run beside others; files in their order, for the long ones
# have few tests and would otherwise come last. More threads than cores would wait for
# each other.
test: $(TEST)  ## lint, types, the committed report and all tests, on JOBS processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

lint: $(TEST)  ## ruff and mypy, over the package, bench, the tests and the notebooks
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tests/typecheck.py

hooks: $(TEST) .venv/.ready-hooks  ## lint, and notebooks without outputs, before each commit
	$(BIN)/pre-commit install

slow-tests: $(TEST)  ## the tests that take too long for make test; run them before a release
	$(BIN)/python -m pytest -m slow

# Its root is the project: runs, figures and the writeup can be opened beside the copies.
lab: $(READY) lab-copies  ## JupyterLab on copies of the notebooks; sweeps execute the notebooks themselves
	$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/lab $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_FLAGS)

lab-copies:  # a copy that was edited stays, and is named when its notebook has changed since
	@mkdir -p lab/.originals
	@for new in notebooks/*.ipynb; do \
	    mine="lab/$${new##*/}"; old="lab/.originals/$${new##*/}"; \
	    if [ -e "$$mine" ] && ! cmp -s "$$mine" "$$old"; then \
	        cmp -s "$$new" "$$old" || echo "$$mine stays as you left it; $$new has changed since: delete yours to get it"; \
	    else \
	        cp "$$new" "$$mine" && cp "$$new" "$$old" || exit 1; \
	    fi; \
	done

bench: .venv/.ready-bench  ## what measuring costs, as ratios in one run, beside other programs
	$(BIN)/python -m bench

check: $(READY)  ## is the committed writeup what the committed records say?
	$(BIN)/stepscope check

reference: $(READY)  ## render the committed writeup from the committed records
	$(BIN)/python -c 'from stepscope.report.machine import write_reference; write_reference("$(REFERENCE)")'
	$(BIN)/stepscope render --writeup --runs $(REFERENCE) --out .

doctor: $(READY)  ## what this machine offers for measuring
	$(BIN)/stepscope doctor

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stepscope needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (make PYTHON=python3.12 takes another)")'
	@echo "Setting up .venv: one to three minutes, the first time. pip says what it fetches and unpacks."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --upgrade 'pip>=25.1'  # faster, and shows how far it is
	$(INSTALL) .
	@touch $@

.venv/.ready-%: $(READY)  # with what an extra of pyproject.toml names
	$(INSTALL) '.[$*]'
	@touch $@

clean:  ## the virtual environment and caches; never runs, nor copies of notebooks
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache lib/*.egg-info
