# make demo and make test do all the set-up on a machine with Python, make and a package index.
# PYTHON=/path/to/python uses that interpreter as it is: no virtual environment, nothing installed.
.DEFAULT_GOAL := help
.PHONY: help demo test test-model test-gpu sanitize endurance fuzz audit lint format docs resources clean

VENV := .venv
PY := $(or $(PYTHON),$(VENV)/bin/python)
READY := $(if $(PYTHON),,$(VENV)/.installed)
# The GPU suite also runs where nothing can be installed: any python3 that has the dependencies.
GPU_PY := $(or $(PYTHON),$(wildcard $(VENV)/bin/python),python3)
MODEL := models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf
WORKERS ?= auto
EXTRAS ?= test
SECONDS ?= 60
TARGETS ?=

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

$(VENV)/.installed: pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -e ".[$(EXTRAS)]"
	@touch $@ $(addprefix $(VENV)/.,$(shell echo "$(EXTRAS)" | tr , ' '))

$(VENV)/.%: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --disable-pip-version-check -e ".[$*]"
	@touch $@

$(MODEL): | $(READY)
	$(PY) scripts/get_model.py 0.5b --into models

demo: $(READY) $(MODEL)  ## install, fetch a real Qwen2.5 0.5B and stream an answer
	$(PY) -m cli generate $(MODEL) --temp 0 --max-tokens 200 \
	  "Write a Python function that checks whether a word is a palindrome. Only the code."

test: $(READY)  ## lint and test; needs no GPU and no model
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest -m "not gpu and not model" -n $(WORKERS)

test-model: $(READY) $(MODEL)  ## the tests of the real 0.5B on the CPU
	$(PY) -m pytest -m "model and not gpu"

test-gpu:  ## the GPU suite, serially; writes tests/gpu-record.json
	PYTHONPATH=tests$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PY) -m pytest -m gpu -p gpu_record

sanitize:  ## compute-sanitizer over the kernels, on a GPU; writes tests/sanitizer-record.json
	$(GPU_PY) tests/sanitize.py

endurance:  ## 100,000 tokens in 500 requests of MODEL, on a GPU; the result goes to benchmarks/results
	$(GPU_PY) benchmarks/endurance.py $(MODEL)

fuzz: $(if $(PYTHON),,$(VENV)/.fuzz)  ## fuzz every target (or TARGETS="gguf ...") for SECONDS=60 each
	$(PY) tests/fuzz/run.py --seconds $(SECONDS) $(TARGETS)

audit: $(if $(PYTHON),,$(VENV)/.audit)  ## look the dependencies up among known vulnerabilities
	$(PY) scripts/audit.py $(AUDIT)

lint: $(READY)  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)  ## let ruff write the formatting
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(READY)  ## regenerate the README's help texts and tables
	$(PY) scripts/docs.py

resources: $(READY)  ## compile changed kernels for every architecture, rewrite tests/kernel-resources.json
	$(PY) tests/kernel_resources.py

clean:  ## remove the virtual environment and caches; models stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
