#!/bin/sh
# The paper's question in six commands: does a strategy of scale vectors lower the validation loss?
# Run it in the clone, with the environment of `make install`. It takes minutes on two cores.
set -e
out=runs/example
steps="--trainer.max_steps 300"

# 1. A corpus: Python's standard library as tokens, in data/stdlib.
lightning-sv prepare --data stdlib

# 2. Two runs that differ in the strategy alone: the baseline, and heterogeneous gamma on both sides of each matrix.
lightning-sv fit --model tiny --scale llama $steps --run_dir $out/llama
lightning-sv fit --model tiny --scale hg+dp+or $steps --run_dir $out/hg+dp+or

# 3. A comparison of both in three pairs of runs of its own, on seeds 0 to 2: differences with intervals.
lightning-sv compare --baseline llama --arms hg+dp+or --seeds 3 --model tiny $steps --out $out/compare

# 4. The page of one run.
lightning-sv report $out/hg+dp+or --out $out/page

# 5. Verdicts on the paper's claims, from the runs that are recorded in results/.
lightning-sv paper --budget cpu --fig own-optimum --results_from results/cpu --no_train --out $out/paper
