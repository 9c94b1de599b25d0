# sparkmoe: `make run` and `make test` need only Python 3.11 or 3.12, make and a package registry.
VENV    := .venv
BIN     := $(VENV)/bin
LOCK    := env/requirements.lock
READY   := $(VENV)/.ready
TO      ?= wheelhouse
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_NUM_THREADS ?= 1

.PHONY: help run lab test lint matrix soak lock wheelhouse spark-install spark-model spark-kernels spark-image clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(READY): $(LOCK) pyproject.toml env/install.sh
	@sh env/install.sh $(VENV) $(LOCK)
	@touch $@

run: $(READY)  ## execute the notebooks against a live server on this machine
	@$(BIN)/sparkmoe run --quick $(ARGS)

lab: $(READY)  ## open JupyterLab with the kernel ready
	@$(BIN)/jupyter lab --ServerApp.root_dir=notebooks $(ARGS)

test: $(READY)  ## lint, types and the whole test suite
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not gpu" $(ARGS)

lint: $(READY)  ## style and types only
	@$(BIN)/ruff check lib tests notebooks
	@$(BIN)/ruff format --check --quiet lib tests
	@$(BIN)/mypy

matrix: $(READY)  ## every head × draft × hot vocabulary on this machine, recorded in results/matrix.json
	@$(BIN)/python -m pytest tests/test_matrix.py -m server $(ARGS)

soak: $(READY)  ## 20,000 requests or ninety minutes of a kept server, killed twenty times; results/<run>/result.json
	@$(BIN)/python tests/soak.py $(ARGS)

spark-install: $(READY)  ## DGX Spark: the same lock, and whether this machine is fit (env/spark/README.md)
	@$(BIN)/sparkmoe doctor

spark-model: $(READY)  ## DGX Spark: Ling-3.0-flash-fp4, 66 GB, resumed and verified
	@$(BIN)/sparkmoe download $(ARGS)

spark-kernels: $(READY)  ## DGX Spark: build FlashInfer's kernels before the weights are loaded
	@$(BIN)/sparkmoe precompile $(ARGS)

spark-image:  ## DGX Spark: the container image sparkmoe:spark (docker or compatible)
	@docker build --platform linux/arm64 -f env/spark/Dockerfile -t sparkmoe:spark $(ARGS) .

lock: $(READY)  ## resolve env/requirements.lock anew (x86-64 and aarch64, Python 3.11 and 3.12)
	@$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	    --no-emit-index-url --no-emit-find-links --group dev pyproject.toml -o $(LOCK)

wheelhouse: $(READY)  ## every wheel of the lock for machines like this one, into TO (wheelhouse/)
	@$(BIN)/python -m pip download --quiet --no-deps --require-hashes --only-binary :all: -r $(LOCK) \
	    --dest $(TO)
	@echo "$$(ls $(TO)/*.whl | wc -l) wheels, $$(du -sh $(TO) | cut -f1): make run WHEELHOUSE=FOLDER installs from them without a network"

clean:  ## remove the environment and the build leftovers (results stay)
	rm -rf $(VENV) build dist lib/*.egg-info .pytest_cache .mypy_cache .ruff_cache
