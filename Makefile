# `make serve` or `make test` in a fresh clone is enough; `make help` lists the rest.

PYTHON ?= python3
PORT ?= 8000
MODEL ?=
DEVICE ?= hpu
ARGS ?=
# make distinguishes case, and would ignore `make serve model=...`.
$(foreach name,python port model device args,$(if $(filter command,$(firstword $(origin $(name)))),\
$(error $(name)= has no effect, variables of this Makefile have capital letters, as in MODEL=demo)))
# TORCH_INDEX is the package index for torch. With an empty value or `none` pip uses its own index;
# without TORCH_INDEX deploy/torch_build.py selects the build.
TORCH_CHOICE = deploy/torch_build.py $(if $(filter undefined,$(origin TORCH_INDEX)),,--index '$(TORCH_INDEX)')

VENV := .venv
BIN := $(VENV)/bin
# Prints the seconds of a long command every few seconds.
COUNTED := $(PYTHON) deploy/counted.py
# The counter shows the steps of pip. Errors of pip are shown unchanged, repeated warnings once.
PIP_INSTALL := -m pip --disable-pip-version-check install --progress-bar off
# In a .venv of install-hpu, pip keeps the vendor's versions, which the shell finds when pip starts.
PIP := $(COUNTED) --summarize pip $(BIN)/python $(PIP_INSTALL) \
	$$(test ! -f $(VENV)/vendor.txt || echo --constraint $(VENV)/vendor.txt)
CLIENTS := .venv-clients
QUANTIZERS := .venv-quantizers
GPTQMODEL := .venv-gptqmodel
NODE_CLIENT := tests/clients/node
AGENTS := tests/clients/agents
AIDER := .venv-aider
PAGE_TESTS := tests/page

.DEFAULT_GOAL := help
.PHONY: help install install-hpu install-dev serve test test-slow test-overload test-resume test-clients test-cuda test-hpu test-deploy test-docs test-kernels test-fuzz test-page test-parallel test-quantizers page-libraries page-pictures reference lint style format bench bench-cuda clean

help: ## Show this list
	@echo "To start a server in a fresh clone: make serve. To test: make test."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PORT=$(PORT)  MODEL=folder, .gguf file or hub id  ARGS='more flags'"
	@echo "  PYTHON=$(PYTHON)  TORCH_INDEX=URL for another build of torch, none for the one that pip finds"

install: $(VENV)/.installed ## Create .venv with what serving on a CPU needs

install-dev: $(VENV)/.installed-dev ## Add what the tests need to .venv

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14) and "gaudiserve needs Python 3.10 to 3.13, $(PYTHON) is " + sys.version.split()[0] + ": set PYTHON, as in make serve PYTHON=python3.13")'
	@# A .venv with a CPU build of torch would have to be removed for install-hpu.
	@$(PYTHON) deploy/vendor_torch.py not-needed
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(COUNTED) 'Creating $(VENV)' $(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@# Keep a .venv of install-hpu: the extra `cpu` would replace its torch.
	@# `make -n` runs every line that calls make, so pip is on another line.
	@if test -f $(VENV)/vendor.txt; then exec $(MAKE) --no-print-directory install-hpu; fi
	@if ! test -f $(VENV)/vendor.txt; then \
	echo "Installing gaudiserve and its dependencies into $(VENV); the first time takes some minutes"; \
	torch=$$($(COUNTED) 'Choosing a build of torch' $(BIN)/python $(TORCH_CHOICE)) && $(PIP) $$torch --editable '.[cpu]'; fi
	@# With a compiler installed, the kernels are compiled now instead of at the first start.
	@echo "Preparing kernels for this CPU; where they must be compiled, 1 to 3 minutes, once"
	@$(COUNTED) 'Preparing kernels' $(BIN)/python -m hpu.native.library
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing what the tests need into $(VENV)"
	@$(PIP) --editable '.[dev]'
	@if test -f $(VENV)/vendor.txt; then $(BIN)/python deploy/vendor_torch.py same $(VENV)/vendor.txt; fi
	@touch $@

install-hpu: ## On a Gaudi machine: a .venv over the system's packages that keeps the vendor's torch
	@$(PYTHON) deploy/vendor_torch.py check
	@test -x $(BIN)/python || $(PYTHON) -m venv --system-site-packages $(VENV)
	@$(BIN)/python deploy/vendor_torch.py check
	@$(BIN)/python deploy/vendor_torch.py constraints > $(VENV)/vendor.txt
	@$(PIP) --editable .
	@$(BIN)/python deploy/vendor_torch.py same $(VENV)/vendor.txt
	@touch $(VENV)/.installed

serve: $(VENV)/.installed ## Serve MODEL (or the demo model, fetched at the first start) on PORT
	@# The server prints its first line after its imports, which may take seconds.
	@echo "Starting gaudiserve on port $(PORT)"
	@exec $(BIN)/gaudiserve serve $(if $(MODEL),"$(MODEL)") --port $(PORT) $(ARGS)

test: style ## Lint, types and the default tests
	@# Compiling changed kernels takes minutes, longer than the time limit of a test.
	@$(COUNTED) 'Preparing kernels' $(BIN)/python -m hpu.native.library
	@# mypy runs in parallel with the first tests.
	@nice -n 19 $(BIN)/mypy --no-error-summary & types=$$!; \
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(ARGS); tests=$$?; \
	wait $$types && exit $$tests

test-slow: $(VENV)/.installed-dev ## Tests that take minutes
	@$(BIN)/python -m pytest -q -m slow $(ARGS)

test-overload: $(VENV)/.installed-dev ## Ten thousand requests of one API key beside a few of another, five minutes
	@$(BIN)/python -m pytest -q -s -m slow tests/e2e/test_flood.py $(ARGS)

test-resume: $(VENV)/.installed-dev ## A hundred kills under streams, with one engine and with two; NUM_KILLS=12 SEED=7 for a part
	@$(BIN)/python -m pytest -q -s -m slow tests/e2e/test_resume_kills.py $(ARGS)

$(CLIENTS)/.installed: pyproject.toml
	@echo "Installing third-party clients into $(CLIENTS)"
	@$(PYTHON) -m venv $(CLIENTS)
	@torch=$$($(COUNTED) 'Choosing a build of torch' $(CLIENTS)/bin/python $(TORCH_CHOICE)) && \
	$(COUNTED) --summarize pip $(CLIENTS)/bin/python $(PIP_INSTALL) $$torch --editable '.[clients]'
	@touch $@

$(NODE_CLIENT)/node_modules: $(NODE_CLIENT)/package-lock.json
	@if command -v npm >/dev/null; then cd $(NODE_CLIENT) && npm ci --silent && touch node_modules; fi

$(AGENTS)/node_modules: $(AGENTS)/package-lock.json
	@# `npm ci` would require the packages of all other systems in the lock file.
	@if command -v npm >/dev/null; then cd $(AGENTS) && npm install --silent --no-save && touch node_modules; fi

$(AIDER)/.installed: $(AGENTS)/aider.txt
	@# aider requires Python below 3.13, and its pinned packages need a separate environment.
	@mkdir -p $(AIDER)
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
	echo "Installing aider into $(AIDER)" && $(PYTHON) -m venv $(AIDER) && \
	$(COUNTED) --summarize pip $(AIDER)/bin/python $(PIP_INSTALL) --requirement $<; fi
	@touch $@

test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed $(NODE_CLIENT)/node_modules $(AGENTS)/node_modules $(AIDER)/.installed ## Third-party clients and coding agents against a server on this machine
	@# Test the newest openai SDK, too: other clients may require an older release.
	@$(BIN)/python -m pytest -q -m clients tests/clients/test_openai_python.py
	@$(CLIENTS)/bin/python -m pytest -q -m clients -W default --server-python=$(BIN)/python tests/clients $(ARGS)

test-cuda: $(VENV)/.installed-dev ## With an NVIDIA GPU: the tests that need a GPU
	@$(BIN)/python -c 'import sys, torch; from hpu.backends.cuda import missing_cuda as missing; sys.exit(missing(torch.__version__, torch.version.cuda, torch.cuda.is_available()))'
	@$(BIN)/python -m pytest -q -m cuda tests/cuda $(ARGS)

test-hpu: $(VENV)/.installed-dev ## On a Gaudi machine: the self-test, then parity, traffic and API on a card; DEVICE=hpu-emulator without a card
	@$(BIN)/gaudiserve selftest --device $(DEVICE); selftest=$$?; test $$selftest -le 1 || exit $$selftest; \
	$(BIN)/python -m pytest -q -m $(if $(filter hpu,$(DEVICE)),hpu,slow) tests/hpu/card $(ARGS) && exit $$selftest

$(VENV)/.deploy: $(VENV)/.installed-dev
	@$(PIP) --editable '.[deploy]' && touch $@

test-deploy: $(VENV)/.deploy ## Manifests, dashboards and images with kubectl (1.21 or newer), Prometheus and clean environments
	@for tool in kubectl prometheus promtool; do command -v $$tool >/dev/null || \
	{ echo "no $$tool: install kubernetes-client and prometheus of your system"; exit 1; }; done
	@$(BIN)/python -m pytest -q -m deploy tests/deploy tests/e2e/test_pod_lifecycle.py $(ARGS)

$(VENV)/.docs: $(VENV)/.installed-dev
	@$(PIP) --editable '.[docs]' && touch $@

test-docs: $(VENV)/.docs ## The site of docs/ without a broken link, and its examples as written, some minutes
	@$(BIN)/python -m mkdocs build --strict --quiet
	@$(BIN)/python -m pytest -q -m docs tests/test_docs_examples.py $(ARGS)

reference: $(VENV)/.installed ## Update the generated tables of docs/ after a change of flags, routes or kinds
	@for tables in config.loading server.app; do $(BIN)/python -m $$tables.reference; done

test-kernels: $(VENV)/.installed-dev ## The kernels with the address and undefined-behaviour sanitizers
	@ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	KERNEL_FLAGS="-O2 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-sanitize=alignment" \
	$(BIN)/python -m pytest -q -s -p no:cacheprovider --timeout 1200 \
	tests/hpu/native/test_native.py tests/hpu/quantization/test_quantized.py $(ARGS)

test-fuzz: $(VENV)/.installed-dev ## Hostile requests for ten minutes; ARGS='--fuzz-seconds 60 --fuzz-seed 7' for others
	@$(BIN)/python -m pytest -q -s -m fuzz tests/fuzz $(ARGS)

$(VENV)/.page: $(VENV)/.installed-dev
	@$(PIP) --editable '.[page]' && touch $@

$(PAGE_TESTS)/node_modules: $(PAGE_TESTS)/package-lock.json
	@cd $(PAGE_TESTS) && npm ci --silent && touch node_modules

test-page: $(VENV)/.page $(PAGE_TESTS)/node_modules ## The page in Chromium (from your system, as npm is), at three widths, some minutes
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	command -v google-chrome >/dev/null || { echo "no Chromium: install chromium of your system"; exit 1; }
	@$(BIN)/python -m pytest -q -m page tests/page $(ARGS)

page-pictures: $(VENV)/.page ## Update the pictures of docs/page.md, with Chromium
	@PYTHONPATH=.:tests/support $(BIN)/python tests/page/make_pictures.py

page-libraries: ## Fetch the page's libraries from npm, in the versions of server/page/vendor/packages.json
	@$(PYTHON) deploy/page_libraries.py

test-parallel: $(VENV)/.installed-dev ## Tensor, expert and data parallelism against one process, a quarter of an hour
	@$(BIN)/python -m pytest -q -m parallel tests/parallel $(ARGS)

$(QUANTIZERS)/.installed: pyproject.toml
	@echo "Installing tools that quantize into $(QUANTIZERS)"
	@$(PYTHON) -m venv $(QUANTIZERS)
	@torch=$$($(COUNTED) 'Choosing a build of torch' $(QUANTIZERS)/bin/python $(TORCH_CHOICE)) && \
	$(COUNTED) --summarize pip $(QUANTIZERS)/bin/python $(PIP_INSTALL) $$torch bitsandbytes auto-round --editable '.[cpu,dev,quantize]'
	@touch $@

$(GPTQMODEL)/.installed: pyproject.toml
	@# llmcompressor requires older releases of transformers than GPTQModel.
	@echo "Installing GPTQModel into $(GPTQMODEL)"
	@$(PYTHON) -m venv $(GPTQMODEL)
	@torch=$$($(COUNTED) 'Choosing a build of torch' $(GPTQMODEL)/bin/python $(TORCH_CHOICE)) && \
	$(COUNTED) --summarize pip $(GPTQMODEL)/bin/python $(PIP_INSTALL) $$torch gptqmodel --editable '.[cpu,dev]'
	@touch $@

test-quantizers: $(QUANTIZERS)/.installed $(GPTQMODEL)/.installed ## Checkpoints that third-party tools quantize, in separate environments
	@$(QUANTIZERS)/bin/python -m pytest -q -m quantizers -W default tests/quantizers $(ARGS)
	@$(GPTQMODEL)/bin/python -m pytest -q -m quantizers -W default tests/quantizers/test_gptqmodel.py $(ARGS)

lint: style ## Check format, style and types
	@$(BIN)/mypy --no-error-summary

style: $(VENV)/.installed-dev ## Check format and style
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .

format: $(VENV)/.installed-dev ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.installed ## Send load to the server on PORT; ARGS as for `gaudiserve bench serve`
	@$(BIN)/gaudiserve bench serve --base-url http://127.0.0.1:$(PORT) $(ARGS)

bench-cuda: $(VENV)/.installed ## With an NVIDIA GPU: decode steps against its bandwidth, and against transformers
	@$(BIN)/python benchmarks/cuda_decode.py $(ARGS)
	@$(BIN)/python benchmarks/cuda_compare.py $(ARGS)

clean: ## Remove .venv, caches and build output
	@rm -rf $(VENV) $(CLIENTS) $(QUANTIZERS) $(GPTQMODEL) $(AIDER) $(NODE_CLIENT)/node_modules $(AGENTS)/node_modules $(PAGE_TESTS)/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
