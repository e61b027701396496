#!/bin/bash
# Install one part of the locked environment in $VENV: install.sh run|hf|text|test|dev|bench|hf4|docs
#
# PYTHON and TORCH choose the interpreter and the version of torch. Without a network, give pip an index:
# PIP_INDEX_URL, or PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu for the CPU's build of torch.
set -eu
part=$1
: "${VENV:=.venv}" "${PYTHON:=python3}" "${TORCH:=torch==2.13.0}"

# -qq hides warnings about the machine's pip settings, but not errors.
pip() { "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --no-compile "$@"; }

# Without dependency resolution, because litdata requires torchvision, which is not needed and breaks a CPU build of
# torch; the extras of pyproject.toml would install it too. The files have every package and its exact version.
locked() { pip --no-deps -r "requirements/$1.txt"; }

new_environment() {
    "$PYTHON" -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
    echo "installing into $VENV (a few minutes)"
    "$PYTHON" -m venv "$VENV"
}

# Compile bytecode once: with PYTHONDONTWRITEBYTECODE, as in many containers, every process would compile again.
# Skip rarely imported files, a third of the bytes: the packages' tests, and hundreds of models.
compile() {
    "$VENV/bin/python" -m compileall -qq -j 0 -x '/(tests?|testing/_internal|transformers/models)/' "$VENV/lib" || true
}

case $part in
run)
    new_environment
    # torch first, because its build (CPU or CUDA) depends on the platform.
    pip "$TORCH" 'setuptools>=77' wheel
    locked lock
    # compat: otherwise a script in the folder that contains the clone imports the clone's folder as an empty package.
    pip --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
    compile
    ;;
hf | text)
    locked "$part"
    ;;
test | dev | bench)
    locked "$part"
    compile
    ;;
hf4) # transformers 4 has an environment of its own
    new_environment
    pip "$TORCH"
    locked hf4
    ;;
docs)
    new_environment
    locked docs
    ;;
*)
    echo "install.sh: $part is unknown; expected run, hf, text, test, dev, bench, hf4 or docs." >&2
    exit 2
    ;;
esac
touch "$VENV/.$part"
