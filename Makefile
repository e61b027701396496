# lightning_sv: `make help` lists the targets. Each one is a command that make prints, and that you can copy.
SHELL := /bin/bash
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
export VENV PYTHON TORCH PROMPT

# Names of files in conf/, or your own text as DATA: lightning-sv resolves them and refuses unknown ones.
MODEL ?= mini
OPTIM ?= adamw
SCHEDULE ?= cos
TRAINER ?= cpu
DATA ?= stdlib
A ?= llama
B ?= unified
BUDGET ?= cpu
GPUS ?= 1
KNOWN := A A_ARGS ARGS B B_ARGS BUDGET CHROMIUM DATA FIG GPUS LR MODEL OPTIM OUT PROBES PROMPT PYTHON RUN SCALE SCHEDULE SEED SEEDS STD TORCH TRAINER VENV

# make would ignore an unknown variable.
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
UNKNOWN := $(filter-out $(KNOWN) SHELL MAKEFLAGS,$(GIVEN))
$(if $(UNKNOWN),$(error there is no variable $(firstword $(UNKNOWN)); known: $(KNOWN)))

SV := $(VENV)/bin/lightning-sv
PY := $(VENV)/bin/python
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2
NAMES = --model "$(MODEL)" --optim "$(OPTIM)" --schedule "$(SCHEDULE)" --trainer "$(TRAINER)" --data "$(DATA)" $(if $(PROBES),--probes "$(PROBES)")
RATES = $(if $(LR),--model.optim.lr "$(LR)") $(if $(STD),--model.backbone.init_std "$(STD)")
RUN_OF = "$(or $(RUN),$(error give RUN, the directory of a run))"

.DEFAULT_GOAL := help
.PHONY: help install install-hf install-text data train resume generate report export plan params compare record sweep paper theory gpu_report test test-all test-faults test-hf4 test-pages check docs tensorboard doctor clean

help:  ## list targets and variables
	@grep -hE '^[a-z0-9_-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'
	@echo '  variables      MODEL OPTIM SCHEDULE TRAINER DATA PROBES: names that `$(SV) presets` lists; DATA also a file or folder of text'
	@echo '                 SCALE A B: strategies, e.g. llama, unified or hg+dp+or; LR STD SEED SEEDS: numbers; RUN OUT: folders'
	@echo '                 BUDGET FIG: of conf/paper; GPUS of plan; PROMPT of generate; ARGS: any words of the command'

# The environment: requirements/install.sh has the commands and their reasons.
$(VENV)/.run: requirements/lock.txt pyproject.toml setup.py
	@requirements/install.sh run
$(VENV)/.hf $(VENV)/.text $(VENV)/.test: $(VENV)/.%: $(VENV)/.run requirements/%.txt
	@requirements/install.sh $*
$(VENV)/.dev: $(VENV)/.test requirements/dev.txt
	@requirements/install.sh dev
$(VENV)-docs/.docs: requirements/docs.txt
	@VENV=$(VENV)-docs requirements/install.sh docs
$(VENV)-hf4/.hf4: requirements/hf4.txt
	@VENV=$(VENV)-hf4 requirements/install.sh hf4

install: $(VENV)/.run  ## install the locked environment in .venv
install-hf: $(VENV)/.hf  ## add transformers, for export and inspect
install-text: $(VENV)/.text  ## add readers of .parquet, .zst and Hugging Face datasets

data: $(VENV)/.run  ## prepare the corpus DATA, a name or your own file or folder
	$(SV) prepare --data "$(DATA)" $(ARGS)

train: $(VENV)/.run  ## train MODEL with the strategy SCALE (unified; iwd for Gemma); prints a table, draws a picture
	$(SV) fit $(NAMES) $(if $(SCALE),--scale "$(SCALE)") $(RATES) $(if $(SEED),--seed_everything "$(SEED)") $(ARGS)

resume: $(VENV)/.run  ## resume RUN from its last checkpoint
	$(SV) fit --config $(RUN_OF)/config.yaml --ckpt_path $(RUN_OF)/checkpoints/last.ckpt $(ARGS)

generate: $(VENV)/.run  ## generate text after PROMPT with the model of RUN
	$(SV) generate $(RUN_OF) --prompt="$$PROMPT" $(ARGS)

report: $(VENV)/.run  ## draw one or several RUN, or folders of runs: a page, pictures, CSV
	$(SV) report $(or $(RUN),$(error give RUN, run directories or folders of them)) $(if $(OUT),--out "$(OUT)") $(ARGS)

export: $(VENV)/.hf  ## export RUN to a folder OUT for transformers
	$(SV) export $(RUN_OF) "$(or $(OUT),$(error give OUT, the folder to write))" $(ARGS)

plan: TRAINER = ddp
plan: $(VENV)/.run  ## estimate memory, hours and data of MODEL on GPUS GPUs
	$(SV) plan --gpus "$(GPUS)" $(NAMES) $(if $(SCALE),--scale "$(SCALE)") $(RATES) $(ARGS)

params: $(VENV)/.run  ## count the parameters of MODEL with the strategy SCALE, by role
	$(SV) params --model "$(MODEL)" $(if $(SCALE),--scale "$(SCALE)") $(ARGS)

compare sweep: MODEL = tiny
compare: $(VENV)/.run  ## compare strategy A with one or several B, SEEDS pairs each: differences, intervals, a picture
	$(SV) compare --baseline "$(A)" --arms $(B) --seeds "$(or $(SEEDS),3)" --a_args="$(A_ARGS)" --b_args="$(B_ARGS)" $(NAMES) $(RATES) $(ARGS)

# The record of docs/experiments.md: the strategy and its own learning rate and initial std.
record: A = llama
record: A_ARGS = --model.optim.lr 0.0079 --model.backbone.init_std 0.011
record: SEEDS = 6
record: compare  ## challenge the record of docs/experiments.md with strategy B and its B_ARGS, in six pairs
	$(PY) results/record.py

sweep: $(VENV)/.run  ## search learning rates LR and initial stds STD for strategies SCALE: the lowest losses, a picture
	$(SV) sweep --scale $(or $(SCALE),unified) $(if $(LR),--lr $(LR)) $(if $(STD),--init_std $(STD)) $(if $(SEEDS),--seeds "$(SEEDS)") $(NAMES) $(ARGS)

paper: $(VENV)/.run  ## train the figures FIG (default: those of the BUDGET, cpu) and judge their claims; ARGS=--dry_run first
	$(SV) paper --budget "$(BUDGET)" $(if $(FIG),--fig $(FIG)) $(ARGS)

theory: $(VENV)/.run  ## check the paper's theorems: verdicts, counterexamples, pictures in results/theory
	$(SV) theory --out results/theory $(ARGS)

test: $(VENV)/.test  ## run the tests, two files at a time; CONTRIBUTING.md lists further ones
	$(PYTEST) --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(VENV)/.test  ## run the tests with all families, strategies, configs and launches
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m 'not faults and not hf4' $(ARGS)

test-faults: $(VENV)/.test  ## test provoked faults and thousands of invalid inputs; results in results/faults.json
	FAULTS_JSON=results/faults.json $(PYTEST) -m faults tests/faults tests/lit $(ARGS)

test-hf4: $(VENV)/.test $(VENV)-hf4/.hf4  ## test exported folders in transformers 4.57 and CTranslate2, in .venv-hf4
	HF4=$(VENV)-hf4/bin/python $(PY) -m pytest -m hf4 tests/interop/test_hf4.py $(ARGS)

test-pages: docs $(VENV)/.run  ## check the site and a report in headless Chromium (CHROMIUM= its path)
	$(SV) paper --budget cpu-100 --fig own-optimum --results_from results/cpu-100 --out build/report > build/report.log 2>&1
	CHROMIUM="$(CHROMIUM)" $(VENV)-docs/bin/python tests/pages_in_browser.py

check: $(VENV)/.dev  ## check format, lint and types
	$(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check . && $(VENV)/bin/mypy

# Without --quiet, which would hide the warnings from --strict too.
docs: $(VENV)-docs/.docs  ## build the pages as a site, build/site/index.html, in .venv-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

# Without an environment, for instance offline, the machine's Python is used and nothing is installed.
gpu_report:  ## measure this CUDA machine in 10 minutes: correctness, cost of scale vectors, peers; ARGS=--help
	$(or $(wildcard $(PY)),$(PYTHON)) -m benchmarks.gpu $(ARGS)

# TensorBoard sorts its cards by name, with the loss after all norms: the link pins the loss first, then Q, K and V.
tensorboard: $(VENV)/.run  ## serve charts of every run on 127.0.0.1
	@echo 'the loss first: http://127.0.0.1:6006/?pinnedCards=%5B%7B%22plugin%22:%22scalars%22,%22tag%22:%22val/loss%22%7D,%7B%22plugin%22:%22scalars%22,%22tag%22:%22train/loss%22%7D,%7B%22plugin%22:%22scalars%22,%22tag%22:%22branch_norm/mean/q_proj/effective%22%7D,%7B%22plugin%22:%22scalars%22,%22tag%22:%22branch_norm/mean/k_proj/effective%22%7D,%7B%22plugin%22:%22scalars%22,%22tag%22:%22branch_norm/mean/v_proj/effective%22%7D%5D&smoothing=0#timeseries'
	$(VENV)/bin/tensorboard --logdir runs --host 127.0.0.1 --port 6006 $(ARGS)

doctor: $(VENV)/.run  ## print versions and devices, for a bug report
	$(PY) -m torch.utils.collect_env

clean:  ## remove environments, runs and prepared corpora
	rm -rf $(VENV) $(VENV)-* runs build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	for layer in data/*/corpus.yaml; do rm -rf "$${layer%/*}"; done; rm -rf data/*.parts data/.*.partial data/.*.lock
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
