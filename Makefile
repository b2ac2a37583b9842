# make report, make test and make lab set up their own virtual environment first; nothing else has to be installed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
REFERENCE := runs/h200

.PHONY: report test trials lab bench check reference doctor clean

report: $(READY)  ## measure this machine and render its report beside its runs
	$(BIN)/stepscope report

test: $(READY)  ## the tests
	$(BIN)/python -m pytest
	$(MAKE) --no-print-directory check

trials: $(READY)  ## the long series of faults: kills at every stage, full disks, with workers and without
	$(BIN)/python -m pytest -m trials

lab: $(READY)  ## JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir notebooks

bench: $(READY)  ## what measuring costs, as ratios in one run, beside other programs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	$(BIN)/stepscope bench

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

clean:  ## the virtual environment and caches; never runs
	rm -rf .venv .pytest_cache lib/*.egg-info
