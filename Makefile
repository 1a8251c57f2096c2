# Development commands. `make check` must pass before a change is merged.

.PHONY: check site format lint types test versions fresh stress chaos mutants debug-suite dist docs bench gpu gpu-report sanitize

# The Python that scripts/setup_env.sh finds or installs.
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

# Test runner, packs and uses of private parts of Triton with each supported version of Triton, each in a
# separate environment. `TESTS=` runs the whole suite.
versions = $(patsubst constraints/triton-%.txt,%,$(wildcard constraints/triton-*.txt))
versions: TESTS = tests/compile/test_runner.py tests/compile/test_packs.py tests/compile/test_compile_only.py \
	tests/tuning/test_packs.py tests/runtime/test_triton_compat.py
versions:
	@failed=; for version in $(versions); do \
		TRITON_VERSION=$$version bash scripts/test.sh $(TESTS) || failed="$$failed $$version"; \
	done; if [ "$$failed" ]; then echo "failed with triton$$failed"; exit 1; fi

# Run the two commands of the README in a fresh clone and an empty environment, with torch for CUDA and
# for CPU. TESTS=tests/runtime selects tests.
fresh:
	bash scripts/fresh.sh $(TESTS)

# Kill writers of tuning records thousands of times, and call expert parallelism with random routings on 2
# to 8 ranks; print counts. Compile every tile of every kernel for sm_90. Train with DDP, and tune kernels
# of a library. Resolve the versions of the constraints. Distribute Hugging Face models. Run the algorithms,
# recipes, numbers of ranks and benchmarks that `test` leaves out. Takes more than half an hour.
stress:
	bash scripts/test.sh tests/stress tests/distributed tests/layers tests/kernels tests/compile tests/architecture tests/testing \
		tests/sanitize tests/faults tests/cli tests/benchmarks tests/docs -m stress -rP

# Test all failures of distributed tuning on 2 and 4 ranks. Takes some minutes.
chaos:
	bash scripts/test.sh tests/distributed tests/tuning -m chaos -rP

# Mutation tests: break one invariant at a time, run the tests that must fail, and print tests that pass.
mutants:
	$(python) tests/mutants/run.py $(MUTANTS)

# Run each test file with kernels without checks and with interp:race and interp:bounds; print findings
# and slowdown. Takes hours; TESTS=tests/kernels selects tests.
debug-suite:
	$(python) tests/debugging/suite.py $(TESTS)

# Test the documentation's code blocks, links and completeness, and the examples; `test` includes this.
docs:
	bash scripts/test.sh tests/docs tests/examples

# Build the documentation in site/, with the API reference from docstrings. Warnings are errors. Then
# test the site, with a browser if Chromium is installed.
site:
	PYTHONPATH=python $(python) -m mkdocs build --strict
	SITE=site $(python) -m pytest -q tests/docs/test_site.py

bench:
	for benchmark in $(wildcard benchmarks/bench_*.py); do bash scripts/launch.sh "$$benchmark" || exit; done

dist:
	$(python) -m pip wheel --no-deps --wheel-dir dist .

# Run the GPU tests. On a host without GPUs they are skipped, with the reason.
gpu:
	bash scripts/test.sh --gpu

# Run all GPU measurements, most important first, and write them to gpu-report; resumes an earlier run.
MINUTES = 60
gpu-report:
	bash scripts/python benchmarks/gpu_report.py --minutes $(MINUTES) --out gpu-report

# Run small calls of each op under compute-sanitizer on two ranks, which share a single GPU if necessary.
# SANITIZE="--tools racecheck gemm_rs" selects a tool and an op.
sanitize:
	bash scripts/python tests/sanitize/run.py $(SANITIZE)
