# lightning_sv: `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
MODEL ?= mini
SCALE ?=
OPTIM ?= adamw
SCHEDULE ?= cos
PROBES ?=
TRAINER ?= cpu
DATA ?= stdlib
A ?= llama
B ?= unified
SEEDS ?=
BUDGET ?=
SEED ?=
RUN ?=
PROMPT ?=
GPUS ?= 1
OUT ?=
ARGS ?=
A_ARGS ?=
B_ARGS ?=
FIG ?=
LR ?=
STD ?=

# Variables read by each target. make would silently ignore others, so they are errors here.
LAYERED := MODEL OPTIM SCHEDULE PROBES TRAINER DATA ARGS
reads-help := MODEL SCALE OPTIM SCHEDULE PROBES TRAINER DATA A B BUDGET SEED SEEDS GPUS FIG
reads-data := DATA ARGS
reads-train := $(LAYERED) SCALE SEED LR STD
reads-resume := RUN ARGS
reads-generate := RUN PROMPT ARGS
reads-report := RUN OUT ARGS
reads-export := RUN OUT ARGS
reads-plan := $(LAYERED) SCALE LR STD GPUS
reads-params := MODEL SCALE ARGS
reads-compare := $(LAYERED) A B A_ARGS B_ARGS SEEDS LR STD
reads-record := A A_ARGS B B_ARGS ARGS
reads-sweep := $(LAYERED) SCALE SEEDS LR STD
reads-paper := BUDGET FIG ARGS
$(foreach name,theory test test-all test-wheel test-faults test-torch211 test-hf4 test-peers test-machines bench bench-step bench-startup gpu_report \
	tensorboard,$(eval reads-$(name) := ARGS))
reads-test-pages := CHROMIUM
$(foreach name,install install-hf install-text check docs doctor clean,$(eval reads-$(name) := ))
ALWAYS := PYTHON TORCH VENV
KNOWN := $(ALWAYS) $(sort $(foreach name,$(filter reads-%,$(.VARIABLES)),$($(name))))

GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
UNKNOWN := $(firstword $(filter-out $(KNOWN) SHELL MAKEFLAGS,$(GIVEN)))
$(if $(UNKNOWN),$(error there is no variable $(UNKNOWN); known: $(KNOWN)))
GOALS := $(or $(MAKECMDGOALS),help)
READ := $(sort $(foreach goal,$(GOALS),$(reads-$(goal))))
UNREAD := $(firstword $(filter-out $(READ) $(ALWAYS),$(filter $(KNOWN),$(GIVEN))))
$(if $(filter undefined,$(foreach goal,$(GOALS),$(origin reads-$(goal)))),,$(if $(UNREAD),$(error make $(GOALS) does not \
	read $(UNREAD); it reads: $(or $(READ),no variable))))

# Recipes read user input from the environment, so that neither make nor a shell evaluates it.
$(foreach name,$(KNOWN),$(eval $(if $(filter $(name),$(GIVEN)),override) $(name) := $$(value $(name))))
export $(KNOWN)
$(if $(filter-out 1,$(words $(VENV))),$(error VENV is '$(VENV)'; expected one path without spaces))
export BIN := $(VENV)/bin
define SPLIT
import os, shlex, sys
try:
    os.write(1, os.fsencode(shlex.join(shlex.split(os.environ["ARGS"]))))
except ValueError as error:
    sys.exit(f"error: ARGS is {os.environ['ARGS']!r}; expected words as a shell takes them ({error}).")
endef
export SPLIT
# Splits ARGS like a shell, including quotes, without evaluating it; the following command uses "$$@".
WORDS = set -f; $(if $(ARGS),words=$$($$PYTHON -c "$$SPLIT") || exit 2; eval "set -- $$words";)
SV = $$BIN/lightning-sv
# -qq hides warnings about the machine's pip settings, but not errors.
PIP = "$$BIN/python" -m pip install -qq --disable-pip-version-check --no-compile
# Compile bytecode once: with PYTHONDONTWRITEBYTECODE, as in many containers, every process would compile again.
# Skip rarely imported files, a third of the bytes: the packages' tests, and hundreds of models.
COMPILE = "$$BIN/python" -m compileall -qq -j 0 -x '/(tests?|testing/_internal|transformers/models)/' "$$VENV/lib" || true

# Names of files in conf/.
names = $(sort $(basename $(notdir $(wildcard conf/$(1)/*.yaml))))
known = $(foreach name,$(filter-out $(call names,$(2)),$($(1))),$(error there is no $(1) '$(name)'; known: $(call names,$(2))))
one = $(if $(filter-out 1,$(words $($(1)))),$(error $(1) is '$($(1))'; expected one of: $(call names,$(2))))
lower = $(shell echo $(1) | tr A-Z a-z)
$(foreach noun,MODEL OPTIM SCHEDULE TRAINER,$(call one,$(noun),$(call lower,$(noun))))
$(foreach noun,MODEL OPTIM SCHEDULE TRAINER PROBES,$(call known,$(noun),$(call lower,$(noun))))
# The callbacks of a second file would replace those of the first.
$(if $(word 2,$(PROBES)),$(call one,PROBES,probes))

# DATA is a file of conf/data; or your own text, a file or folder, prepared in data/<its name>; or that name.
# As one word: spaces become ?, which $(wildcard) matches.
comma := ,
space := $(subst ,, )
WORD := $(patsubst ./%,%,$(patsubst %/,%,$(subst $(space),?,$(DATA))))
$(foreach sign,? * [,$(if $(findstring $(sign),$(DATA)),$(error DATA is '$(DATA)'; expected a name, a file or a folder, \
	without $(sign))))
export TEXT := $(subst ?,$(space),$(WORD))
STEM := $(or $(subst ?,_,$(basename $(notdir $(WORD)))),text)
NAMED := $(if $(findstring ?,$(WORD)),,$(patsubst data/%,%,$(WORD)))
export OWN := $(if $(filter $(call names,data),$(WORD)),,data/$(if $(wildcard data/$(NAMED)/corpus.yaml),$(NAMED),$(STEM)))
$(if $(OWN),,$(if $(findstring /,$(DATA)),$(error DATA is '$(DATA)'; expected $(WORD) for conf/data/$(WORD).yaml, or a text of a \
	different name, because its corpus would be data/$(WORD) too)))
MADE := $(if $(OWN),$(wildcard $(OWN)/corpus.yaml))
THERE := $(if $(wildcard $(WORD)),$(WORD))
prepared = $(patsubst data/%/corpus.yaml,%,$(wildcard data/*/corpus.yaml))
$(if $(OWN),$(if $(MADE)$(THERE),,$(error there is no DATA '$(DATA)', and no text of that name; \
	known: $(sort $(call names,data) $(prepared)))))
$(if $(and $(OWN),$(filter $(OWN),$(THERE))),$(if $(MADE),,$(error DATA is '$(DATA)', where its corpus would be \
	prepared; expected a text outside of data/ or deeper in it)))
# The folder again, because corpus.yaml has its first name.
OWN_LAYER = --config "$$OWN/corpus.yaml" --data.corpus.dir "$$OWN"
CORPUS = $(if $(OWN),$(if $(MADE),$(OWN_LAYER)) $(if $(filter-out $(OWN),$(THERE)),--data.corpus.source "files:$$TEXT" \
	--data.corpus.dir "$$OWN"),--config conf/data/$(WORD).yaml)

# The model comes after these layers, because it sets values that depend on its size. Your own text comes last,
# because it sets the model's vocabulary.
LAYERS = base optim/$(OPTIM) schedule/$(SCHEDULE) trainer/$(TRAINER) $(if $(OWN),,data/$(WORD))
CONFIG = $(foreach layer,$(LAYERS) model/$(1) $(PROBES:%=probes/%),--config conf/$(layer).yaml) $(if $(OWN),$(OWN_LAYER))

OF_SCALE = $(if $(SCALE),--model.scale "$$SCALE")
OF_LR = $(if $(LR),--model.optim.lr "$$LR") $(if $(STD),--model.backbone.init_std "$$STD")

.DEFAULT_GOAL := help
.DEFAULT:
	$(error there is no target $@; make help lists them)

.PHONY: help install install-hf install-text data train resume generate report export plan params compare record sweep paper theory gpu_report test test-all test-wheel test-faults test-torch211 test-hf4 test-peers test-machines test-pages check docs bench tensorboard doctor clean

help:  ## list the targets
	@grep -hE '^[a-z0-9_-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'
	@echo
	@echo "  variables    MODEL=$(MODEL) of: $(call names,model)"
	@echo "               SCALE=$(SCALE) a preset, llama or unified, or words of the axes, e.g. hg+dp+or:"
	@echo "                 hg; nop bp ap dp dnp; direct, offset, or, er; wd iwd owd nowd"
	@echo "               OPTIM=$(OPTIM) of: $(call names,optim); SCHEDULE=$(SCHEDULE) of: $(call names,schedule)"
	@echo "               TRAINER=$(TRAINER) of: $(call names,trainer); DATA=$(DATA) of: $(strip $(call names,data) $(filter-out $(call names,data),$(prepared))),"
	@echo "                 or a file or folder of .txt .md .py .jsonl .ndjson .json .parquet"
	@echo "               SEED=$(or $(SEED),0) of train; RUN= a run's directory, PROMPT= OUT= of generate and export; GPUS=$(GPUS) of plan"
	@echo "               A= B= strategies of compare, by default llama and unified; SEEDS= of compare and sweep; A_ARGS= B_ARGS= ARGS='any key, e.g. --trainer.max_steps 500'"
	@echo "               LR= STD= learning rate and initial std; of sweep several, e.g. LR='0.003 0.006 0.012'"
	@echo "               BUDGET=$(SPEND) of: $(call names,paper/budgets)"
	@echo "               FIG='$(FIG)' of: $(call names,paper)"
	@echo "               PROBES=$(PROBES) measurements during training: $(call names,probes)"
	@echo "               PYTHON=$$PYTHON TORCH=$$TORCH VENV=$$VENV of the environment"

# torch first, because its build (CPU or CUDA) depends on the platform. The rest without dependency
# resolution, because litdata requires torchvision, which is not needed and breaks a CPU build of torch.
# compat: otherwise a script in the folder that contains the clone imports the clone's folder as an empty package.
$(VENV)/.run: requirements/lock.txt pyproject.toml setup.py
	@$$PYTHON -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "installing into $$VENV (a few minutes)"
	@$$PYTHON -m venv "$$VENV"
	@$(PIP) "$$TORCH" 'setuptools>=77' wheel
	@$(PIP) --no-deps -r requirements/lock.txt
	@$(PIP) --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
	@$(COMPILE)
	@touch "$$VENV/$(@F)"

# The extras of pyproject.toml would install torchvision too.
$(VENV)/.hf $(VENV)/.text: $(VENV)/.%: $(VENV)/.run requirements/%.txt
	@$(PIP) --no-deps -r requirements/$*.txt
	@touch "$$VENV/$(@F)"

$(VENV)/.test: $(VENV)/.run requirements/test.txt requirements/hf.txt requirements/text.txt
	@$(PIP) --no-deps -r requirements/test.txt
	@$(COMPILE)
	@touch "$$VENV/$(@F)"

$(VENV)/.dev: $(VENV)/.test requirements/dev.txt
	@$(PIP) --no-deps -r requirements/dev.txt
	@$(COMPILE)
	@touch "$$VENV/$(@F)"

$(VENV)/.bench: $(VENV)/.test requirements/bench.txt
	@$(PIP) --no-deps -r requirements/bench.txt
	@$(COMPILE)
	@touch "$$VENV/$(@F)"

$(VENV)/.hf4: requirements/hf4.txt
	@$$PYTHON -m venv "$$VENV"
	@$(PIP) $$TORCH
	@$(PIP) --no-deps -r requirements/hf4.txt
	@touch "$$VENV/$(@F)"

$(VENV)/.docs: requirements/docs.txt
	@$$PYTHON -m venv "$$VENV"
	@$(PIP) --no-deps -r requirements/docs.txt
	@touch "$$VENV/$(@F)"

install: $(VENV)/.run  ## install the locked environment in .venv
	@echo "installed: $$BIN/lightning-sv --help"

install-hf: $(VENV)/.hf  ## add transformers, for export, roles and inspect

install-text: $(VENV)/.text  ## add readers of .parquet, .zst and Hugging Face datasets

data: $(VENV)/.run $(if $(filter train,$(MAKECMDGOALS)),check-train)  ## prepare the corpus DATA, a name or your own file or folder
	@$(if $(filter data,$(MAKECMDGOALS)),$(WORDS)) $(SV) prepare $(CORPUS) "$$@"

# Wrong arguments are reported before a corpus is prepared, which takes minutes. Own texts have no corpus.yaml yet.
CHECKED = $(foreach layer,$(filter-out data/%,$(LAYERS)),--config conf/$(layer).yaml) $(CORPUS) \
	$(foreach layer,model/$(MODEL) $(PROBES:%=probes/%),--config conf/$(layer).yaml)
IS_PREPARED = $(wildcard $(or $(OWN),data/$(WORD))/corpus.yaml)
.PHONY: check-train
check-train: $(VENV)/.run
	@$(if $(IS_PREPARED),,$(WORDS) $(SV) fit --dry_run $(CHECKED) $(OF_SCALE) $(OF_LR) \
		$(if $(SEED),--seed_everything "$$SEED") "$$@" > /dev/null)

train: data  ## train MODEL with the strategy SCALE (unified; iwd for Gemma); prints a table, draws a picture
	@$(WORDS) $(SV) fit $(call CONFIG,$(MODEL)) $(OF_SCALE) $(OF_LR) $(if $(SEED),--seed_everything "$$SEED") "$$@"

NEWEST = $(firstword $(shell ls -td runs/*/*/config.yaml 2>/dev/null))
NEEDS_RUN = $(if $(RUN),,$(error give RUN, the directory of a run$(if $(NEWEST),$(comma) e.g. RUN=$(NEWEST:/config.yaml=))))
resume: $(VENV)/.run  ## resume RUN from its last checkpoint
	@$(NEEDS_RUN)$(WORDS) $(SV) fit --config "$$RUN/config.yaml" --ckpt_path "$$RUN/checkpoints/last.ckpt" "$$@"

generate: $(VENV)/.run  ## generate text after PROMPT with the model of RUN
	@$(NEEDS_RUN)$(WORDS) $(SV) generate "$$RUN" --prompt="$$PROMPT" "$$@"

# RUN is one path, possibly with spaces, or several paths or a pattern.
report: $(VENV)/.run  ## draw one or several RUN, or folders of runs: a page, pictures, CSV
	@$(NEEDS_RUN)$(WORDS) set +f; IFS=$$([ -e "$$RUN" ] || printf ' \n\t'); \
		$(SV) report $$RUN $(if $(OUT),--out "$$OUT") "$$@"

export: $(VENV)/.hf  ## export RUN to a folder OUT for transformers
	@$(NEEDS_RUN)$(if $(OUT),,$(error give OUT, the folder to write))$(WORDS) $(SV) export "$$RUN" "$$OUT" "$$@"

plan: $(VENV)/.run  ## estimate memory, hours and data of MODEL on GPUS GPUs
	@$(WORDS) $(SV) plan --gpus "$$GPUS" $(call CONFIG,$(MODEL)) $(OF_SCALE) $(OF_LR) "$$@"

params: $(VENV)/.run  ## count the parameters of MODEL with the strategy SCALE, by role
	@$(WORDS) $(SV) params --config conf/base.yaml --config conf/model/$(MODEL).yaml $(OF_SCALE) "$$@"

compare: MODEL = tiny
compare: data  ## compare strategy A with one or several B, SEEDS pairs each: differences, intervals, a picture
	@$(WORDS) $(SV) compare --a "$$A" --b $$B --seeds "$${SEEDS:-3}" --a_args="$$A_ARGS" --b_args="$$B_ARGS" \
		$(call CONFIG,$(MODEL)) $(OF_LR) "$$@"

# The record of docs/records.md: the strategy and its own learning rate and initial std.
$(if $(filter record,$(MAKECMDGOALS)),$(if $(filter 1,$(words $(B))),,$(error B is '$(B)'; expected one strategy)))
$(if $(and $(filter record,$(MAKECMDGOALS)),$(findstring --out,$(ARGS))),$(error ARGS is '$(ARGS)'; expected no --out))
record: A = llama
record: A_ARGS = --model.optim.lr 0.0079 --model.backbone.init_std 0.011
record: SEEDS = 6
record: compare  ## challenge the record of docs/records.md with strategy B and its B_ARGS, in six pairs
	@"$$BIN/python" results/record.py

sweep: MODEL = tiny
sweep: data  ## search learning rates LR and initial stds STD for strategies SCALE: the lowest losses, a picture
	@$(WORDS) $(SV) sweep --scale $${SCALE:-unified} $(if $(LR),--lr $$LR) $(if $(STD),--init_std $$STD) \
		$(if $(SEEDS),--seeds "$$SEEDS") $(call CONFIG,$(MODEL)) "$$@"

# The budget of the experiments. Its corpora are prepared, except those of the Hugging Face hub (terabytes).
SPEND = $(or $(BUDGET),cpu)
SPENDS = $(if $(and $(filter 1,$(words $(SPEND))),$(filter $(call names,paper/budgets),$(SPEND))),,$(error there is no \
	BUDGET '$(SPEND)'; known: $(call names,paper/budgets)))
NAMED = $(shell sed -n 's/^layers: *\[\(.*\)\].*/\1/p' conf/paper/budgets/$(SPEND).yaml)
OF_BUDGET = $(foreach name,$(filter data/%,$(subst $(comma),$(space),$(NAMED))),$(if $(shell grep -l hf: conf/$(name).yaml),,$(name)))
paper: $(VENV)/.run  ## reproduce the paper's figures FIG (all) on a BUDGET (cpu): runs, verdicts; ARGS=--dry_run first
	@$(SPENDS)$(foreach name,$(if $(filter --dry% --no_t% --no-t%,$(ARGS)),,$(OF_BUDGET)),$(SV) prepare --config conf/$(name).yaml && ) true
	@$(WORDS) $(SV) paper --budget '$(SPEND)' $(if $(FIG),--fig $$FIG) "$$@"

theory: $(VENV)/.run  ## check the paper's theorems: verdicts, counterexamples, pictures in results/theory
	@$(WORDS) $(SV) theory --out results/theory "$$@"

test: $(VENV)/.test  ## run the tests, two files at a time
	@$(WORDS) OMP_NUM_THREADS=1 "$$BIN/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$$@"

test-all: $(VENV)/.test  ## run the tests with all families, strategies, configs and launches
	@$(WORDS) OMP_NUM_THREADS=1 "$$BIN/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		-m 'not faults and not hf4' "$$@"

test-wheel: $(VENV)/.test  ## test the wheel in an empty folder: a script, a run (part of test-all)
	@$(WORDS) OMP_NUM_THREADS=1 "$$BIN/python" -m pytest -m long tests/test_wheel.py "$$@"

test-faults: $(VENV)/.test  ## test provoked faults and thousands of invalid inputs; results in results/faults.json
	@$(WORDS) OMP_NUM_THREADS=1 FAULTS_JSON=results/faults.json "$$BIN/python" -m pytest -n 2 -m faults tests/faults \
		tests/lit/test_exact_resume.py tests/lit/test_long_run.py tests/theory/test_command.py "$$@"

test-torch211:  ## run the tests on torch 2.11, the oldest supported version, in .venv-torch211
	@$(MAKE) --no-print-directory VENV="$$VENV-torch211" TORCH=torch==2.11.0 test

test-hf4: $(VENV)/.test  ## test exported folders in transformers 4.57 and CTranslate2, in .venv-hf4
	@$(MAKE) --no-print-directory VENV="$$VENV-hf4" "$$VENV-hf4/.hf4"
	@$(WORDS) HF4="$$VENV-hf4/bin/python" "$$BIN/python" -m pytest -m hf4 tests/interop/test_hf4.py "$$@"

test-peers:  ## test strategies and groups in litgpt, torchtitan and PEFT, in .venv-bench
	@$(MAKE) --no-print-directory VENV="$$VENV-bench" "$$VENV-bench/.bench"
	@$(WORDS) "$$VENV-bench/bin/python" -m pytest tests/interop/test_groups.py tests/interop/test_apply.py \
		-k 'litgpt or torchtitan or peft or lora' "$$@"

test-machines: $(VENV)/.test  ## run numerical tests for other CPUs, 2 threads and random order; ARGS selects variants
	@$(WORDS) "$$BIN/python" -m tests.machines "$$@"

check: $(VENV)/.dev  ## check format, lint and types
	@$$BIN/ruff format --check .
	@$$BIN/ruff check .
	@$$BIN/mypy

docs:  ## build the pages as a site in build/site, in .venv-docs
	@$(MAKE) --no-print-directory VENV="$$VENV-docs" "$$VENV-docs/.docs"
	@NO_MKDOCS_2_WARNING=1 "$$VENV-docs/bin/mkdocs" build --strict --quiet
	@echo 'the site: build/site/index.html'

test-pages: docs $(VENV)/.run  ## check the site and a report in headless Chromium (CHROMIUM= its path); screenshots in build/screenshots
	@$(SV) paper --budget cpu-100 --fig own-optimum --results_from results/cpu-100 --no_log --out build/report > build/report.log 2>&1
	@"$$VENV-docs/bin/python" tests/pages_in_browser.py

# Peers have a separate environment, invisible to tests and runs. ARGS applies to all: --rounds 10
bench:  ## time training steps of models against peers, and Hessian-vector products, in .venv-bench
	@$(MAKE) --no-print-directory VENV="$$VENV-bench" "$$VENV-bench/.bench"
	@$(WORDS) "$$VENV-bench/bin/python" -m benchmarks.step "$$@"
	@$(WORDS) "$$VENV-bench/bin/python" -m benchmarks.moe_models "$$@"
	@$(WORDS) "$$VENV-bench/bin/python" -m benchmarks.curvature "$$@"

# --json skips measurements that the file already has, so that a run of hours can be interrupted: see --help.
.PHONY: bench-step
bench-step:  ## time only the training steps of 'make bench'; ARGS="--threads 1 --widths 256 --json FILE" selects and records
	@$(MAKE) --no-print-directory VENV="$$VENV-bench" "$$VENV-bench/.bench"
	@$(WORDS) "$$VENV-bench/bin/python" -m benchmarks.step "$$@"

.PHONY: bench-startup
bench-startup: $(VENV)/.run  ## measure the CPU seconds before a command works, and before the first step of a run
	@$(WORDS) "$$BIN/python" -m benchmarks.startup "$$@"

# Without an environment, for instance offline, the machine's Python is used and nothing is installed.
gpu_report:  ## measure this CUDA machine in 10 minutes: correctness, cost of scale vectors, peers; ARGS=--help
	@$(WORDS) $(if $(wildcard $(BIN)/python),"$$BIN/python",$$PYTHON) -m benchmarks.gpu "$$@"

# TensorBoard sorts its cards by name, with the loss after all norms: the link pins the loss first, then Q, K and V, and
# disables smoothing of the validation loss.
tag = %7B%22plugin%22:%22scalars%22,%22tag%22:%22$(1)%22%7D
PINS = val/loss train/loss $(foreach branch,q k v,branch_norm/mean/$(branch)_proj/effective)
PINNED = ?pinnedCards=%5B$(subst $(space),$(comma),$(foreach pin,$(PINS),$(call tag,$(pin))))%5D&smoothing=0\#timeseries
tensorboard: $(VENV)/.run  ## serve charts of every run on 127.0.0.1
	@$(WORDS) port=$$(sed -n 's/.*--port[ =]*\([0-9]*\).*/\1/p' <<< "$$ARGS"); port=$${port:-6006}; \
		echo "the loss first: http://127.0.0.1:$$port/$(PINNED)"; \
		$$BIN/tensorboard --logdir runs --host 127.0.0.1 --port "$$port" "$$@"

doctor: $(VENV)/.run  ## print versions and devices, for a bug report
	@"$$BIN/python" -m torch.utils.collect_env

clean:  ## remove environments, runs and prepared corpora
	rm -rf "$$VENV" "$$VENV"-* runs build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	for layer in data/*/corpus.yaml; do rm -rf "$${layer%/*}"; done; rm -rf data/*.parts data/.*.partial data/.*.lock
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
