# One command an intent. `make check` is everything that must hold before a change goes in.

.PHONY: check site format lint types test versions fresh stress chaos mutants debug-suite dist docs bench gpu gpu-report sanitize

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

# Kernels from every level, packs, and what is asked of Triton that it does not promise, with every Triton
# that is supported, each in an environment of its own. `TESTS=` for the whole suite.
versions = $(patsubst constraints/triton-%.txt,%,$(wildcard constraints/triton-*.txt))
versions: TESTS = tests/compile/test_runner.py tests/compile/test_packs.py tests/compile/test_compile_only.py \
	tests/tuning/test_archives.py tests/tuning/test_packs.py tests/runtime/test_triton_compat.py
versions:
	@failed=; for version in $(versions); do \
		TRITON_VERSION=$$version bash scripts/test.sh $(TESTS) || failed="$$failed $$version"; \
	done; if [ "$$failed" ]; then echo "failed with triton$$failed"; exit 1; fi

# The two commands of the README in a fresh clone and an empty environment, for both kinds of torch.
# TESTS=tests/runtime limits this to some tests.
fresh:
	bash scripts/fresh.sh $(TESTS)

# Thousands of kills of writers of tuning records, with the counts; and every tile of every kernel,
# compiled for sm_90. Some minutes.
stress:
	bash scripts/test.sh tests/stress tests/compile -m stress -rP

# Every way in which a distributed tuning can go wrong, on 2 and 4 ranks; some minutes.
chaos:
	bash scripts/test.sh tests/distributed tests/tuning -m chaos -rP

# Breaks one invariant after another and runs the tests that must notice; prints those that did not.
mutants:
	$(python) tests/mutants/run.py $(MUTANTS)

# Tests that run kernels, file by file, without checks and under interp:race and interp:bounds: what
# the checks report, and how much longer the tests take. Hours; TESTS=tests/kernels limits it.
debug-suite:
	$(python) tests/debugging/suite.py $(TESTS)

# The documentation's code blocks, links and completeness, and the examples; part of `test` too.
docs:
	bash scripts/test.sh tests/docs tests/examples

# The pages as a site in site/, with the API reference from docstrings.
site:
	PYTHONPATH=python $(python) -m mkdocs build --strict --quiet

bench:
	for benchmark in $(wildcard benchmarks/bench_*.py); do bash scripts/launch.sh "$$benchmark" || exit; done

dist:
	$(python) -m pip wheel --no-deps --wheel-dir dist .

# On a host without GPUs the tests are listed as skipped, with the reason.
gpu:
	bash scripts/test.sh --gpu

# All that is measured on GPUs, the most valuable first, into the folder gpu-report; goes on with it.
MINUTES = 60
gpu-report:
	bash scripts/python benchmarks/gpu_report.py --minutes $(MINUTES) --out gpu-report

# A little of each op under compute-sanitizer, on two ranks, of one GPU if there is but one.
# SANITIZE="--tools racecheck gemm_rs" limits it to a tool and an op.
sanitize:
	bash scripts/python tests/sanitize/run.py $(SANITIZE)
