PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RELEASE := .venv-release
PIP_ARGS ?=
ARGS ?=
JOBS ?= 2
IN_PARALLEL = --tx $(shell expr $(JOBS) + 1)*popen --tx $(JOBS)*popen//nice=10 --dist load --maxschedchunk 1 --max-worker-restart 4# tests/harness/scheduling.py
export PYTHONDONTWRITEBYTECODE :=# hundreds of processes would each compile the same modules

.DEFAULT_GOAL := help
.PHONY: help install demo test pytest test-all test-more lint type proto proto-check hashes release released sim mutate structure bench bench-gpu soak pictures clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 12

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("atoll needs Python >= 3.11, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[node,dev]'
	touch $@

install: $(VENV)/.installed ## make .venv and install atoll with exact versions

demo: install ## train a small language model on three sites on this machine (ARGS="--help")
	$(BIN)/atoll demo $(ARGS)

lint: install ## ruff, import contracts, proto lint, and that no message breaks those of the last release
	$(BIN)/ruff check node protocol coordinator src tests benchmarks examples
	$(BIN)/ruff format --check node protocol coordinator src tests benchmarks examples
	PYTHONPATH=src $(BIN)/lint-imports --no-cache
	$(BIN)/buf lint
	$(BIN)/buf breaking --against tests/released/protocol.binpb

type: install ## mypy --strict
	$(BIN)/mypy src tests

test: install ## lint, types and tests, and how long each took; CI runs this, and then `make mutate` (JOBS=3 ARGS="-k name")
	@.ci/parts "$(MAKE) --no-print-directory lint" "$(MAKE) --no-print-directory proto-check" \
		"$(MAKE) --no-print-directory -j2 type pytest"

pytest: install # of `test`: mypy, which needs one core, runs beside it
	$(BIN)/python -m tests.harness.compiled & $(BIN)/pytest --collect-only -q > /dev/null; wait $$!  # once, and not in each process of pytest
	$(BIN)/pytest $(IN_PARALLEL) --durations=20 $(ARGS)

test-all: lint type proto-check ## everything, slow tests included
	$(BIN)/pytest $(IN_PARALLEL) -m 'not gpu' $(ARGS)

$(VENV)/.trainers: $(VENV)/.installed tests/trainers/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[node,dev,hf,lightning,wandb,mlflow,trackio]' peft webdataset datasets
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps -r tests/trainers/requirements.txt
	touch $@

OF_LARGER_SITES = $(addprefix tests/,process/test_layouts.py process/test_context.py process/test_sites_of_several_ranks.py \
	process/test_sites_of_several_hosts.py process/test_memory_of_ranks.py process/test_demo.py process/test_endpoints.py \
	process/test_exchange_processes.py process/test_liveness.py unit/cli/test_dry_run.py \
	unit/parallel/test_plan_memory.py unit/worker/test_checkpoints_of_layouts.py)

test-more: $(VENV)/.trainers ## sites with trainers of others, optimizers of libraries and trackers, which it installs; then the heavy cases of larger sites
	$(BIN)/pytest -m more tests/trainers tests/trackers tests/unit/worker/test_hugging_face.py $(ARGS)
	$(BIN)/pytest -m slow $(OF_LARGER_SITES) $(ARGS)

sim: install ## 5,000 seeded schedules of faults on simulated time, one of 100 sites that all reduce, one of 1,000 (ARGS="--help")
	$(BIN)/python -m tests.simulation $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m tests.simulation --sites 100 && $(BIN)/python -m tests.simulation --sites 1000)

mutate: install ## break the code in named ways and show that the tests notice (ARGS="--help")
	$(BIN)/python -m tests.mutation $(ARGS)

structure: install ## circles of imports, long files, fields of several writers and more, each within its bound (ARGS="--help")
	$(BIN)/python -m tests.structure $(ARGS)

proto: install ## generate code from protocol/v1/*.proto
	$(BIN)/python -m grpc_tools.protoc -I src --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --python_out=src --mypy_out=src src/atoll/protocol/v1/*.proto
	$(BIN)/python -m grpc_tools.protoc -I src --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --grpc_python_out=src --mypy_grpc_out=src src/atoll/protocol/v1/session.proto src/atoll/protocol/v1/peer.proto

proto-check: proto ## generated code is what the .proto files say
	git diff --exit-code --stat -- protocol/v1 || (echo "protocol/v1 is not current: run 'make proto' and commit"; exit 1)

$(RELEASE)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt build cyclonedx-bom 'pip>=24' uv
	touch $@

hashes: $(RELEASE)/.installed ## hashes of what atoll needs, in the versions of constraints.txt
	$(RELEASE)/bin/python -m tests.harness.hashes $(RELEASE)/bin/uv

release: $(RELEASE)/.installed ## wheel, sdist, notes, bill of materials and sums of the version that is tagged, in dist (ARGS=--untagged)
	$(RELEASE)/bin/python -m tests.harness.release $(ARGS)

released: install ## keep the protocol of COMMIT as that of the last release (COMMIT=v0.1.0)
	$(BIN)/python -m tests.harness.released $(COMMIT)

soak: MINUTES ?= 30
soak: install ## six sites under random faults, and what they keep of their speed (MINUTES=30 ARGS="--seed 7")
	$(BIN)/python -m tests.harness.soak --minutes $(MINUTES) $(ARGS)

bench-gpu: install ## figures of a GPU: copies, codecs, a training loop beside itself without atoll (ARGS="--help")
	$(BIN)/python -m benchmarks gpu $(ARGS)

bench: install ## figures of the README and docs (ARGS="--help")
	$(BIN)/python -m benchmarks $(ARGS)

pictures: install ## those of docs/pictures, of a run on this machine (needs chromium, and matplotlib)
	$(BIN)/python -m tests.harness.pictures

clean: ## remove .venv and caches
	rm -rf $(VENV) $(RELEASE) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
