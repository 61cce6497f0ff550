PYTHON ?= python3
# Test processes; each uses one thread of torch.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The package as a user gets it. The checkers read this copy: in the source tree, and so in an
# editable install, they do not see `converters/` and `tasks/` as parts of `nfn_graph`.
WHEEL := $(VENV)/wheel

.DEFAULT_GOAL := help
.PHONY: help setup scatter test lint wheel types imports docs reference unit exactness coverage demo bench \
	release clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Create .venv with everything that the checks need

$(READY): pyproject.toml setup.py constraints.txt tests/foreign.txt
	@echo "Installing into $(VENV), which takes a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[tasks,dev]'
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/foreign -r tests/foreign.txt
	@touch $@

scatter: $(READY) ## Add torch-scatter, a second backend (built from source, some 8 minutes)
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation torch-scatter

test: lint types imports docs unit ## Run all checks: ruff, mypy, the import rule, the site, pytest

lint: $(READY) ## Check style and format with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# `build/` would carry modules deleted since the last build into the new wheel.
wheel: $(READY)
	@rm -rf build $(WHEEL)
	@$(BIN)/python -m pip install -q --no-deps --no-build-isolation --target $(WHEEL) .

types: wheel ## Check types with mypy, on the installed package
	cd $(WHEEL) && "$(CURDIR)/$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" \
		--cache-dir "$(CURDIR)/.mypy_cache" -p nfn_graph

imports: wheel ## Check that imports go one way: core <- converters <- tasks
	cd $(WHEEL) && "$(CURDIR)/$(BIN)/lint-imports" --config "$(CURDIR)/pyproject.toml" --no-cache --no-logo

# The variable silences the theme's notice of its successor, which is no warning of ours.
docs: $(READY) ## Build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

reference: $(READY) ## Write the reference pages, docs/api and docs/cli.md, from the code
	$(BIN)/python docs/hooks/reference.py

unit: $(READY) ## Run pytest in WORKERS processes
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

ROOMS := nfn_graph converters tasks
coverage: $(READY) ## Run pytest and count the lines that it reaches: at least 95% in every room
	@rm -rf .coverage && mkdir .coverage
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		--cov --cov-report=
	@failed=; for room in $(ROOMS); do \
		$(BIN)/coverage report --include="$$room/*" || failed=1; \
	done; test -z "$$failed"

# What proves the layer exact, on the kernels of a backend: fused, plain or torch-scatter.
BACKEND ?= plain
EXACT := testing/test_completeness nn/test_paper nn/test_equivariance data/test_batch interop/test_nfn \
	transforms/test_transforms nn/test_layers nn/test_whole_models
exactness: $(READY) ## Run the exactness suite on BACKEND
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		--backend $(BACKEND) $(EXACT:%=tests/%.py)

demo: $(READY) ## Train a zoo of small CNNs and models that read its weights; some minutes
	$(BIN)/nfn-graph demo --out demo

bench: $(READY) ## Run every benchmark; tables and figures in benchmarks/results
	$(BIN)/python benchmarks/all.py

release: $(READY) ## Build wheel and source archive into dist/, try them in an empty environment
	$(BIN)/python tests/release.py dist

clean: ## Delete .venv, caches and build products
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
