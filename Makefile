PYTHON ?= python

.PHONY: check test full bench

check:  ## what a change must pass before review
	ruff format --check .
	ruff check .
	mypy
	$(PYTHON) -m pytest -q tests/test_layering.py tests/test_docs.py

test:  ## the quick form of every suite
	$(PYTHON) -m pytest -q -m "not slow and not gpu and not multi_gpu"

full:  ## everything a CPU can run, in slices of 30 minutes; the same command goes on where the last one stopped
	$(PYTHON) tools/full.py --minutes 30

bench:  ## every benchmark; JSON goes to benchmarks/results
	$(PYTHON) benchmarks/probe_cost.py
	$(PYTHON) benchmarks/launch_cost.py
	$(PYTHON) benchmarks/run_cost.py
