# Two commands do everything on a fresh machine with Python 3.11 or 3.12:   make train    make test
PYTHON ?= python3
VENV   := .venv
# The launchers (deepspeed, torchrun) and ninja are found on the path.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
READY  := $(VENV)/.ready
CUDA   := build/cuda
FAKE   := tests/helpers/fake_cuda
RANKS  ?= 1
# Versions in place of those of constraints.txt: a file of them, or `none` for the newest that pyproject.toml allows.
PINS   ?=
PART   ?= 1
CASES  ?=

.PHONY: help setup train finetune test smoke test-all test-torchao test-liger test-cuda faults lint format docs gpu-check gpu-rehearsal bench thirty test-rare coverage wheel clean
help:
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 18

setup: $(READY) ## create .venv with everything in it, at the pinned versions
$(READY): pyproject.toml constraints.txt .ci/setup
	PYTHON=$(PYTHON) bash .ci/setup $(VENV) lora,dev $(PINS)
	@touch $@

train: $(READY) ## the quickstart: a small Llama from scratch, on text that ships with Python
	deepstow train --ranks $(RANKS) --config quickstart

finetune: $(READY) ## fine-tune what `make train` exported
	deepstow train --ranks $(RANKS) --config finetune

# Each file stays with one process, and the slow folders come first, so that all end together; some wait for others most of the time.
PYTEST := OMP_NUM_THREADS=1 python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=20
PARTS  := tests/e2e tests/faults tests/parity tests/memory tests/unit
# The simulated accelerator needs processes of its own, which wait most of the time: they run beside the others, and are printed after them.
test: $(READY) ## the tests, in five processes; the twenty slowest of each part are named at its end
	@mkdir -p build
	@python .ci/compile.py
	@OMP_NUM_THREADS=1 python -m pytest tests/accelerator -n 2 --dist loadfile --durations=20 > build/accelerator.txt 2>&1 & beside=$$!; \
	$(PYTEST) $(PARTS) -m "not slow"; others=$$?; \
	wait $$beside; code=$$?; cat build/accelerator.txt; exit $$((others | code))

# Of the unit tests all files but those that plan whole models or start commands; of the others those that say most in a second.
COSTLY := apart at_once bad_folders bench block_timing blocks chat count_cache data_packing data_report docs earlier experts \
  export facts fit foreign_files frozen gpu_check hybrid_command hybrid_search importing init keep_or_offload kernel_choice \
  liger loading model_config nonfinite one_allocator parts picture plan_for planner_keep private_methods profile prune \
  published_choices qat ranks rates recompute refusals resume_keys run_budget saved_adapter scheduler_examples sealing sequence \
  short_plan stopping tasks tensor trackers trainer two_doors verify watchdog
SMOKE  := $(filter-out $(COSTLY:%=tests/unit/test_%.py),$(wildcard tests/unit/test_*.py)) \
  $(addprefix tests/parity/test_,activations.py engine_random.py)
smoke: $(READY) ## what most mistakes break, in a minute
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist loadfile -m "not slow and not ranks" $(SMOKE)

test-all: $(READY) ## the slower tests that make test leaves out
	$(PYTEST) $(PARTS) -m "slow and not rare"

test-rare: $(READY) ## what make test-all leaves out: one more way of what others test
	$(PYTEST) $(PARTS) -m rare

# Lines that only processes of their own run, as the ranks of a command, count as not covered.
coverage: $(READY) ## which lines make test runs: a table, and pages in build/coverage
	pip install -q --no-deps --upgrade --target build/coverage/site pytest-cov coverage
	COVERAGE_FILE=build/coverage/data PYTHONPATH=$(CURDIR)/build/coverage/site $(PYTEST) $(PARTS) -m "not slow" --cov --cov-report=term --cov-report=html:build/coverage/pages

wheel: $(READY) ## the wheel, in build/wheel
	rm -rf build/lib build/wheel  # what an earlier one left would be packed again
	pip wheel -q --no-deps --no-build-isolation --wheel-dir build/wheel .

# Not in .venv: Transformers imports torchao wherever it is installed, which prints warnings and takes seconds of each start.
test-torchao: $(READY) ## the tests of what torchao does, which is installed into build/torchao
	pip install -q -c constraints.txt --no-deps --upgrade --target build/torchao torchao
	PYTHONPATH=$(CURDIR)/build/torchao $(PYTEST) tests/parity/test_qat.py tests/unit/test_qat.py tests/parity/test_quantized.py

# Triton's interpreter runs them on a CPU. Pinned here alone: torch for CUDA brings a Triton of its own.
test-liger: $(READY) ## the tests with Liger's kernels, which are installed into build/liger
	pip install -q --no-deps --upgrade --target build/liger liger-kernel==0.8.5 triton==3.9.0
	TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/build/liger $(PYTEST) --dist load tests/parity/test_liger.py

# Torch's wheel for CUDA believes in GPUs that are made of host memory; see $(FAKE)/README.md. Not part of .ci/run: the
# environment is a download of 3 GB, and all takes about ten minutes.
test-cuda: $(CUDA)/.ready ## the tests that need CUDA, on one made of host memory; at first it downloads 3 GB
	$(CUDA)/bin/python $(FAKE)/build.py build/fake-cuda
	OMP_NUM_THREADS=1 build/fake-cuda/fake-cuda python -m pytest tests/cuda -n 2 --dist loadfile --durations=10
	OMP_NUM_THREADS=1 build/fake-cuda/fake-cuda python -m pytest tests/accelerator --device cuda -n 2 --dist loadfile --durations=10
$(CUDA)/.ready: pyproject.toml constraints.txt .ci/setup $(FAKE)/constraints.txt
	@command -v g++ > /dev/null || { echo "make test-cuda compiles a CUDA of its own, and there is no g++: install it"; exit 1; }
	PYTHON=$(PYTHON) bash .ci/setup $(CUDA) lora $(FAKE)/constraints.txt nvidia-cuda-crt pytest pytest-xdist hypothesis
	@touch $@

# What is in tests/faults/full is collected only by its path; two processes, since most of it waits.
faults: $(READY) ## every fault at every moment, hours on 2 cores; CASES="-k launcher" chooses some
	OMP_NUM_THREADS=1 python -m pytest tests/faults/full/test_*.py -n 2 --dist loadfile --durations=20 $(CASES)

lint: $(READY) ## format, lint, type checks, and dead links of the docs
	ruff format --check .
	ruff check .
	lint-imports --no-logo --no-cache
	mypy
	mkdocs build --quiet --strict --config-file .ci/mkdocs.yml

format: $(READY) ## format the code
	ruff format .
	ruff check --fix .

docs: $(READY) ## write the tables of keys into docs/, and build the site into build/docs; a dead link is an error
	python -m deepstow.trainer.config.doc
	python .ci/commands.py
	mkdocs build --strict --config-file .ci/mkdocs.yml

gpu-check: $(READY) ## the campaign on a GPU, three calls of 9 minutes: PART=1, 2, 3; others: benchmarks/README.md
	python -m deepstow.benchmarks.gpu_check $(PART)

gpu-rehearsal: $(READY) ## every part of gpu-check with the smallest models, here
	rm -rf runs/gpu-rehearsal
	python -m deepstow.benchmarks.gpu_check all --rehearse --patience 3 --seconds 7200 --out runs/gpu-rehearsal

bench: $(READY) ## offload against its peers, on this machine; a record under benchmarks/records
	deepstow bench offload

thirty: $(READY) ## thirty runs of two ranks in a row; each must end with exit code 0
	DEEPSTOW_RUNS=30 python -m pytest tests/e2e/test_thirty.py

clean: ## delete the environment and caches; runs/ stays
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache
