# One command an intent. `make check` is everything that must hold before a change goes in.

.PHONY: check format lint types test stress chaos dist docs bench gpu

# The Python that scripts/setup_env.sh finds, or sets up.
python = $(shell bash -c '. scripts/setup_env.sh; detect_gpus; find_python cpu dev && echo "$$PYTHON"')

check: lint types test

format:
	$(python) -m ruff format .
	$(python) -m ruff check --fix .

lint:
	$(python) -m ruff format --check .
	$(python) -m ruff check .

types:
	$(python) -m mypy

test:
	bash scripts/test.sh

# Thousands of kills of writers of tuning records, with the counts; about two minutes.
stress:
	bash scripts/test.sh tests/stress -m stress -rP

# Every way in which a distributed tuning can go wrong, on 2 and 4 ranks; some minutes.
chaos:
	bash scripts/test.sh tests/distributed tests/tuning -m chaos -rP

# The documentation's code blocks, links and completeness, and the examples; part of `test` too.
docs:
	bash scripts/test.sh tests/docs tests/examples

bench:
	for benchmark in $(wildcard benchmarks/bench_*.py); do bash scripts/launch.sh "$$benchmark" || exit; done

dist:
	$(python) -m pip wheel --no-deps --wheel-dir dist .

# On a host without GPUs the tests are listed as skipped, with the reason.
gpu:
	bash scripts/test.sh --gpu
