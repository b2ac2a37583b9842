# make report, make test and make lab set up their own virtual environment first; nothing else has to be installed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
REFERENCE := runs/h200
JOBS ?= 2
LAB_FLAGS ?=

.PHONY: report test lint trials hooks lab lab-copies bench check reference doctor clean

report: $(READY)  ## measure this machine and render its report beside its runs
	$(BIN)/stepscope report

# lint and check are among the tests, and run beside others. More threads than cores would wait for each other.
test: $(READY)  ## the tests, on JOBS processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

lint: $(READY)  ## ruff and mypy, over the package, bench, the tests and the notebooks
	$(BIN)/ruff check
	$(BIN)/python tests/typecheck.py

hooks: $(READY)  ## lint, and notebooks without outputs, before each commit
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[hooks]'
	$(BIN)/pre-commit install

trials: $(READY)  ## what takes longer than make test may: before a release
	$(BIN)/python -m pytest -m trials

lab: $(READY) lab-copies  ## JupyterLab on copies of the notebooks; sweeps execute the notebooks themselves
	$(BIN)/jupyter lab --notebook-dir lab $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_FLAGS)

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

bench: $(READY)  ## what measuring costs, as ratios in one run, beside other programs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m bench

check: $(READY)  ## is the committed report what the committed records say?
	$(BIN)/stepscope check --runs $(REFERENCE) --out .

reference: $(READY)  ## render the committed report anew from the committed records
	$(BIN)/stepscope render --runs $(REFERENCE) --out .

doctor: $(READY)  ## what this machine offers for measuring
	$(BIN)/stepscope doctor

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stepscope needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (make PYTHON=python3.12 takes another)")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

clean:  ## the virtual environment and caches; never runs, nor copies of notebooks
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache lib/*.egg-info
