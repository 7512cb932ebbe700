PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

.PHONY: demo test bench lint learn clean

# The environment is made on first use and again when the build inputs change.
$(VENV)/ready: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt torch==2.13.0
	PIP_CONSTRAINT=constraints.txt $(PY) -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(VENV)/ready
	$(PY) examples/ppo.py --out out

test: $(VENV)/ready
	$(PY) -m pytest

learn: $(VENV)/ready
	$(PY) examples/learn.py --out out/learn

lint: $(VENV)/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV) .venv-* build out
