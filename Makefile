PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
BENCH_VENV := .venv-bench
BENCH_PY := $(BENCH_VENV)/bin/python
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

.PHONY: demo test torture bench lint learn clean

# The environment is made on first use and again when the build inputs change. rsl_rl and rllte, which the tests train with,
# ask for ONNX, TensorBoard's server, old versions of matplotlib and more, none of which they need here: they come without
# dependencies, and [dev] has those they import. MinAtar's games need numpy alone.
$(VENV)/ready: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt torch==2.13.0
	PIP_CONSTRAINT=constraints.txt $(PY) -m pip install --quiet --editable '.[dev]'
	$(PY) -m pip install --quiet --constraint constraints.txt --no-deps rsl-rl-lib tensorboard rllte-core MinAtar
	touch $@

demo: $(VENV)/ready
	$(PY) examples/ppo.py --out out

test: $(VENV)/ready
	$(PY) -m pytest --numprocesses 2 --dist loadgroup

torture: $(VENV)/ready
	$(PY) -m pytest -m torture

# The peers live in an environment of their own, so that they cannot change the versions that the tests use.
$(BENCH_VENV)/ready: $(SOURCES) benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_PY) -m pip install --quiet --constraint constraints.txt torch==2.13.0
	PIP_CONSTRAINT=constraints.txt $(BENCH_PY) -m pip install --quiet --editable '.[examples]'
	$(BENCH_PY) -m pip install --quiet --no-deps --requirement benchmarks/requirements.txt
	touch $@

bench: $(BENCH_VENV)/ready
	$(BENCH_PY) -m benchmarks.run

learn: $(VENV)/ready
	$(PY) examples/learn.py --out out/learn

lint: $(VENV)/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV) .venv-* build out
