PYTHON ?= python3
WHEEL_PYTHONS ?= python3.10 python3.11 python3.12 python3.13
VENV := .venv
PY := $(VENV)/bin/python
BENCH_VENV := .venv-bench
BENCH_PY := $(BENCH_VENV)/bin/python
ADAPTERS_VENV := .venv-adapters
ADAPTERS_PY := $(ADAPTERS_VENV)/bin/python
RLLTE_VENV := .venv-rllte
RLLTE_PYTHON ?= python3.10
OLDEST_VENV := .venv-oldest
OLDEST_PYTHON ?= python3.10
REVERB_VENV := .venv-reverb
REVERB_PYTHON ?= python3.11
DOCS_VENV := .venv-docs
# The names of all modules. An editable install of scikit-build-core only knows the modules that existed when it was made, so a
# new or moved module needs a new install. This file is rewritten only if a name has changed: an edit does not reinstall.
MODULES := build/modules
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*) $(MODULES)

# Tests start many processes, which import faster with bytecode: it is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo quick quick-files wheels test torture sanitize bench reverb adapters rllte oldest lint learn docs docs-serve clean always

# The environment is created on first use and updated when one of its inputs changes. rsl_rl, rllte and Stable-Baselines3, which
# the tests train with, require ONNX, the TensorBoard server, old versions of matplotlib and more, none of which is needed here:
# they are installed without dependencies, and [dev] lists what they import. The games of MinAtar only need numpy, and Minari
# needs the others of its dependencies for its command line.
$(VENV)/ready: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt torch==2.13.0
	PIP_CONSTRAINT=constraints.txt $(PY) -m pip install --quiet --editable '.[dev]'
	$(PY) -m pip install --quiet --constraint constraints.txt --no-deps rsl-rl-lib tensorboard rllte-core MinAtar stable-baselines3 minari
	touch $@

$(MODULES): always
	@mkdir -p $(@D)
	@find src -name '*.py' | sort > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

demo: $(VENV)/ready
	$(PY) examples/ppo.py --out out

# The inner loop: what every storage promises and the parts that they share. Other files take longer, in what they import
# (Triton's interpreter, rsl_rl, rllte) or in what they do (learning, processes, clusters, long searches).
LONG := $(addprefix tests/engine/test_,slots.py snapshot.py folder.py shared_memory.py pieces.py limiter.py returns.py \
	seal.py hostile_folders.py unreadable_tensors.py) \
	$(addprefix tests/contract/test_,state_machine.py refused_calls.py extra_fields.py whole_storage.py \
	replay_trainer.py distributed_trainer.py saved.py journaled.py folder_mutants.py resumed_training.py saved_machine.py)
QUICK := $(filter-out $(LONG),$(wildcard tests/contract/test_*.py tests/engine/test_*.py)) \
	tests/test_golden.py tests/test_trainer.py tests/test_storage_base.py \
	$(wildcard tests/test_rollout_documented*.py tests/test_decoupled_documented*.py) tests/test_known_bugs.py \
	tests/distributed/test_distributed_documented_add.py tests/replay/test_nstep_documented.py \
	$(addprefix tests/replay/test_nstep_documented_,batches.py finals.py) \
	$(addprefix tests/replay/test_,known_priority_bugs.py replay_model.py) \
	tests/kernels/test_table.py tests/ray/test_steps_and_wire.py

quick: $(VENV)/ready
	$(PY) -m pytest --numprocesses 2 --dist loadgroup -m "not torture and not slow" $(QUICK)

# A wheel for each Python, in dist, tried without a compiler: it downloads torch for each.
wheels:
	tools/wheels.sh dist $(WHEEL_PYTHONS)

# For tools/try_wheel.sh, where there may be no make.
quick-files:
	@mkdir -p build
	@echo $(QUICK) > build/quick-files

test: $(VENV)/ready
	$(PY) -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder

torture: $(VENV)/ready
	$(PY) -m pytest -m torture --numprocesses 2 --dist loadgroup --no-loadscope-reorder

# The C++ with sanitizers of GCC: the tests that reach most of it, with random and hostile input; those in which threads use it;
# and, in threads and without Python, what processes share without a lock.
HOSTILE := $(wildcard tests/replay/test_*_machine.py tests/test_*forged*.py tests/*/test_*mutants*.py)
LOCKLESS := $(addprefix csrc/,episodes.cpp frames.cpp limiter.cpp processes.cpp replay.cpp rows.cpp slots.cpp)

sanitize: $(VENV)/ready
	tools/sanitize/run.sh address,undefined $(PY) --numprocesses 2 --dist loadgroup \
		tests/kernels tests/engine tests/test_golden.py tests/test_threads.py $(HOSTILE)
	tools/sanitize/run.sh thread $(PY) tests/test_threads.py tests/kernels/test_native_threads.py
	$(CXX) -std=c++17 -O1 -g -fsanitize=thread -Wno-tsan tests/sanitize/threads.cpp $(LOCKLESS) -o build/sanitize/threads
	build/sanitize/threads

# The libraries that we compare with have a separate environment, so that they cannot change the versions that the tests use.
$(BENCH_VENV)/ready: $(SOURCES) benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_PY) -m pip install --quiet --constraint constraints.txt torch==2.13.0
	PIP_CONSTRAINT=constraints.txt $(BENCH_PY) -m pip install --quiet --editable '.[examples]'
	$(BENCH_PY) -m pip install --quiet --no-deps --requirement benchmarks/requirements.txt
	touch $@

# Reverb needs Python 3.11 or older, and versions of numpy and protobuf that nothing else here can use.
$(REVERB_VENV)/ready: benchmarks/requirements-reverb.txt
	$(REVERB_PYTHON) -m venv $(REVERB_VENV)
	$(REVERB_VENV)/bin/python -m pip install --quiet --no-deps --requirement benchmarks/requirements-reverb.txt
	touch $@

reverb: $(REVERB_VENV)/ready

# Without Reverb the others are measured.
bench: $(BENCH_VENV)/ready
	-$(MAKE) reverb
	$(BENCH_PY) -m benchmarks.run

# Programs of other libraries with our storages in place of theirs, in an environment with all that those libraries require; then
# whether they learn as well and as fast with ours as with their own, which takes about 10 minutes.
$(ADAPTERS_VENV)/ready: $(SOURCES) adapters/requirements.txt
	$(PYTHON) -m venv $(ADAPTERS_VENV)
	$(ADAPTERS_PY) -m pip install --quiet --constraint constraints.txt torch==2.13.0
	PIP_CONSTRAINT=constraints.txt $(ADAPTERS_PY) -m pip install --quiet --editable . --requirement adapters/requirements.txt
	touch $@

adapters: $(ADAPTERS_VENV)/ready
	$(ADAPTERS_PY) -m pytest adapters
	$(ADAPTERS_PY) -m adapters.learn_sb3 --out out/adapters

# rllte needs Python 3.10, and versions of numpy and matplotlib that nothing else here can use. rlstore comes last, with a newer
# gymnasium than seaborn's of that time allows for: pip finds nothing that suits all.
$(RLLTE_VENV)/ready: $(SOURCES) adapters/requirements-rllte.txt
	$(RLLTE_PYTHON) -m venv $(RLLTE_VENV)
	$(RLLTE_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(RLLTE_VENV)/bin/python -m pip install --quiet --requirement adapters/requirements-rllte.txt
	$(RLLTE_VENV)/bin/python -m pip install --quiet --editable . 'numpy<2'
	touch $@

rllte: $(RLLTE_VENV)/ready
	$(RLLTE_VENV)/bin/python -m pytest adapters/test_rllte.py

# The oldest versions that pyproject.toml allows. This torch is only there for CUDA, with several gigabytes, and its Triton is too
# old for our kernels: they run in the interpreter of a newer one.
$(OLDEST_VENV)/ready: $(SOURCES)
	$(OLDEST_PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet torch==2.3.0 tensordict==0.9.1 gymnasium==1.1.0 numpy==1.24.0 ray==2.40.0 \
		--editable '.[inspect,ray]' pytest pytest-timeout pytest-xdist hypothesis safetensors
	$(OLDEST_VENV)/bin/python -m pip install --quiet --no-deps triton==3.7.1
	touch $@

oldest: $(OLDEST_VENV)/ready
	CI=1 $(OLDEST_VENV)/bin/python -m pytest --numprocesses 2 --dist loadgroup -m "not torture and not slow" \
		$(QUICK) tests/kernels tests/replay

learn: $(VENV)/ready
	$(PY) examples/learn.py --out out/learn

lint: $(VENV)/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The site is built from the sources: rlstore is not installed there.
$(DOCS_VENV)/ready: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --no-deps --requirement docs/requirements.txt
	touch $@

docs: $(DOCS_VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo 'The site is in build/site: open build/site/index.html'

docs-serve: $(DOCS_VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs serve

clean:
	rm -rf $(VENV) .venv-* build out
