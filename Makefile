# Every target sets up what it needs; `make help` lists them.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
PY := $(VENV)/bin/python

# The engine that the tests and the demo run. vLLM's CPU build wants exactly this PyTorch, whose
# "+cpu" label keeps pip from taking the CUDA build of the same release.
TORCH_VERSION ?= 2.13.0+cpu
VLLM_VERSION ?= 0.32.0
# Where PyTorch's CPU build comes from when pip's own sources lack it. A value given here by the
# user is the only source asked: make setup TORCH_INDEX_URL=file:///srv/wheels/simple
TORCH_INDEX_URL ?= https://download.pytorch.org/whl/cpu
TORCH_INDEX_ONLY := $(if $(filter file,$(origin TORCH_INDEX_URL)),,1)
export VENV TORCH_VERSION VLLM_VERSION TORCH_INDEX_URL TORCH_INDEX_ONLY

# A finished set-up leaves a file named after what went into it, so that it runs again only when
# one of these changes.
STAMP := $(VENV)/.setup-$(shell { cat Makefile pyproject.toml constraints.txt scripts/*.sh; \
	echo $(TORCH_VERSION) $(VLLM_VERSION); } | sha256sum | cut -c1-16)

CHECKED := $(wildcard weightsync server client tests benchmarks examples scripts)
BENCHMARKS := push sharded scale pullers staging apply gate control refusals delta train engines

.PHONY: help
help: ## List the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1 \2/p' $(MAKEFILE_LIST) | \
		while read -r target text; do printf '  %-16s %s\n' "$$target" "$$text"; done

# The delta kernels, which an editable install compiles too; again when their source is newer.
KERNELS := weightsync/delta/kernels
LIBRARY := $(KERNELS)/kernels.so

.PHONY: setup
setup: $(STAMP) $(LIBRARY) ## Make .venv with PyTorch and vLLM for the CPU, this project and its tools

$(STAMP): | $(PY)
	bash scripts/setup.sh
	rm -f $(VENV)/.setup-*
	touch $@

$(LIBRARY): $(wildcard $(KERNELS)/*.[ch]) scripts/build_kernels.py | $(STAMP)
	$(PY) scripts/build_kernels.py

$(PY):
	bash scripts/make_venv.sh

.PHONY: torch
torch: $(PY) # PyTorch's CPU build alone; setup calls the same script
	bash scripts/install_torch.sh

.PHONY: generate
generate: setup ## Write the stubs of protos/
	$(PY) scripts/generate.py

.PHONY: check-generated
check-generated: setup ## Fail if the committed stubs are not those of protos/
	$(PY) scripts/generate.py --check

.PHONY: reference
reference: setup ## Write the pages of docs/reference that the code knows: commands, settings, calls, errors, messages; and docs/llms.txt
	$(PY) scripts/reference_pages.py
	$(PY) scripts/message_catalogue.py
	$(PY) scripts/docs_site.py

.PHONY: plots
plots: setup ## Draw the plots of docs/explain from docs/proof.json
	$(PY) scripts/plots.py

.PHONY: docs
docs: setup ## Build the docs as a site in build/site; a broken link fails
	$(PY) -m mkdocs build --strict

.PHONY: format
format: setup ## Format the code and the protos
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/buf format --write

.PHONY: lint
lint: setup check-generated ## ruff, mypy, buf, the stubs, and which room may import which
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-cache
	$(PY) scripts/house.py
	$(VENV)/bin/buf lint
	$(VENV)/bin/buf format --diff --exit-code
	$(VENV)/bin/mypy $(CHECKED)

# tests/stages.py says what is in each, and how many modules run at a time; JOBS: on how many cores.
STAGES := test test-extensions test-faults test-fleet test-vllm test-matrix
export JOBS

.PHONY: $(STAGES)
test: setup ## Lint, the core's unit tests and its main path on real servers and a real vLLM: start here
test-extensions: setup ## Supervised trainer, adapters for frameworks, verbs of others
test-faults: setup ## Crashes, bytes, floods, authority, exhaustion
test-fleet: setup ## Fleets of real servers over each kind of register
test-vllm: setup ## All else that a real vLLM (CPU) shows
test-matrix: setup ## Kinds of trainers, stores and models; examples, benchmarks in small, deployment
$(STAGES):
	$(PY) -m tests.stages $@ $(PYTEST_ARGS)

# pytest answers 5 when it selects nothing.
.PHONY: battery
battery: setup ## Every fault at every failpoint, more cells with TP 2; what needs a quiet machine
	$(PY) -m pytest -m "battery and not gpu and not alone" -n $(or $(JOBS),2) --dist loadfile \
		--no-loadscope-reorder $(PYTEST_ARGS) || [ $$? -eq 5 ]
	$(PY) -m pytest -m "alone and not gpu" $(PYTEST_ARGS) || [ $$? -eq 5 ]

.PHONY: fuzz
fuzz: setup ## Fuzz parsers and request stream for SECONDS (60), with SEED if given
	$(PY) -m pip install -q --disable-pip-version-check --constraint constraints.txt --group fuzz
	$(PY) -m tests.fuzz --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED))

.PHONY: planted
planted: setup ## Plant bugs into a copy of the tree, JOBS (2) at a time: which test notices? EACH=1: one of each invariant
	$(PY) -m tests.planted --jobs $(or $(JOBS),2) $(if $(EACH),--one-each) $(if $(JSON),--json $(JSON))

.PHONY: soak
soak: setup ## Use the service for MINUTES (20) under random faults, with SEED if given; VLLM=1: a real vLLM; FLEET=1: a fleet
	$(PY) -m tests.soak --minutes $(or $(MINUTES),20) $(if $(SEED),--seed $(SEED)) $(if $(VLLM),--vllm) $(if $(FLEET),--fleet)

.PHONY: prove
prove: setup ## What CI does not run, or PART of it; each line with its commit into docs/proof.json
	$(PY) -m tests.prove --part "$(PART)"

# On a host whose environment is there already; without a git repository it is told the COMMIT.
.PHONY: prove-gpu
prove-gpu: ## The same on a host with GPUs: their tests and benchmarks, or PART of them, into STORE
	PYTHONPATH="$(GPU_PATH)" $(PY) -m tests.prove --gpu --part "$(PART)" \
		$(if $(COMMIT),--commit $(COMMIT)) $(if $(STORE),--store $(STORE))

.PHONY: prove-merge
prove-merge: setup # Takes STORE over, which `make prove-gpu` wrote elsewhere
	$(PY) -m tests.prove --merge $(STORE)

.PHONY: prove-docs
prove-docs: setup # Writes the figures of docs/proof.json into the pages, and draws its plots
	$(PY) -m tests.prove --docs
	$(PY) scripts/plots.py

.PHONY: prove-ages
prove-ages: setup # Tells which code each part was run on
	$(PY) -m tests.prove --ages

.PHONY: demo
demo: setup ## Watch a model learn a sentence while it generates
	$(PY) -m examples.demo

.PHONY: demo-recording
demo-recording: setup # Runs the demo, and draws what it prints in docs/assets/demo.svg
	$(PY) scripts/demo_recording.py

.PHONY: demo-fleet
demo-fleet: setup ## Watch a fleet take each version together while one of its hosts dies and returns
	$(PY) -m examples.fleet_demo

.PHONY: demo-train
demo-train: setup ## Watch a vLLM learn from a request while it answers others, and a fresh one answer the same
	$(PY) -m examples.train_demo

.PHONY: $(BENCHMARKS:%=bench-%)
$(BENCHMARKS:%=bench-%): bench-%: setup
	$(PY) -m benchmarks.$* --json

.PHONY: bench-memory
bench-memory: setup
	$(PY) -m benchmarks.push --memory --json

# Minutes on two cores, and the same figures on every machine.
.PHONY: bench-simulation
bench-simulation: setup
	$(PY) -m benchmarks.fleet --simulate 10,100,1000 --json

# Namespaces, so it needs root; about ten minutes.
.PHONY: bench-fleet
bench-fleet: setup
	$(PY) -m benchmarks.fleet --hosts 8 --json

.PHONY: bench
bench: $(BENCHMARKS:%=bench-%) bench-memory bench-simulation $(if $(filter 0,$(shell id -u)),bench-fleet) ## Every benchmark, one JSON line each (bench-push, bench-control, ...)

GPU_PATH = $(CURDIR):$(CURDIR)/server:$(CURDIR)/client:$${PYTHONPATH:-}

# On a host whose environment is there already, so it sets nothing up: make gpu-bench PART=apply
# PY=python3. `$(PY) -m benchmarks.gpu --help` tells the parts.
.PHONY: gpu-bench
gpu-bench: ## Measure PART on a host with GPUs, with FLAGS if given; one JSON line
	@PYTHONPATH="$(GPU_PATH)" $(PY) -m benchmarks.gpu --json --part $(PART) $(FLAGS)

.PHONY: test-gpu
test-gpu: # The tests that need a GPU, on such a host
	PYTHONPATH="$(GPU_PATH)" $(PY) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

.PHONY: release
release: setup ## Build what an index would get into dist/: wheels for x86_64 and aarch64, sdist, SHA256SUMS
	$(PY) -m pip install -q --disable-pip-version-check --constraint constraints.txt --group release
	rm -rf dist
	for machine in x86_64 aarch64; do \
		WEIGHTSYNC_WHEEL_MACHINE=$$machine $(PY) -m hatchling build -t wheel -d dist || exit 1; \
	done
	$(PY) -m hatchling build -t sdist -d dist
	cd dist && sha256sum *.whl *.tar.gz > SHA256SUMS

.PHONY: constraints
constraints: ## Pin in constraints.txt what .venv holds now
	bash scripts/constraints.sh

.PHONY: clean
clean: ## Remove .venv, caches and build outputs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
