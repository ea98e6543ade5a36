PYTHON ?= python

.PHONY: check test test-gpu cluster-test full evaluate bench bench-gpu

check:  ## what a change must pass before review
	ruff format --check .
	ruff check .
	mypy
	$(PYTHON) -m pytest -q tests/project/test_layering.py tests/project/test_docs.py

test:  ## the quick form of every suite
	$(PYTHON) -m pytest -q -m "not slow and not gpu and not multi_gpu"

full:  ## everything a CPU can run, in slices of 30 minutes; the same command goes on where the last one stopped
	$(PYTHON) tools/full.py --minutes 30
	$(PYTHON) tools/mutate.py --minutes 30 --jobs 2

test-gpu:  ## what needs a GPU: half types, long sequences, NCCL; with two GPUs also what needs two
	$(PYTHON) -m pytest -q -m "gpu or multi_gpu"

cluster-test:  ## what needs Slurm, on a real cluster that the tests start on this machine; installs Debian's packages
	tools/install_slurm.sh --all
	$(PYTHON) -m pytest -q -rs -n0 -m cluster tests/engine

evaluate:  ## rescore all stored evidence; say what is not as committed (`--write` of python -m evaluation score writes it)
	$(PYTHON) -m evaluation score

bench:  ## every benchmark of a CPU; JSON goes to benchmarks/results
	$(PYTHON) benchmarks/probe_cost.py
	$(PYTHON) benchmarks/launch_cost.py
	$(PYTHON) benchmarks/run_cost.py
	$(PYTHON) benchmarks/nsa_memory.py
	$(PYTHON) benchmarks/nsa_learning.py
	$(PYTHON) benchmarks/nsa_step_cost.py
	$(PYTHON) benchmarks/cpu_roofline.py
	$(PYTHON) benchmarks/telemetry_cost.py
	$(PYTHON) benchmarks/loader.py
	$(PYTHON) benchmarks/nsa_choices.py

bench-gpu:  ## the whole operation against dense attention on this machine's GPU
	$(PYTHON) benchmarks/nsa_op.py
