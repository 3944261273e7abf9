#!/bin/sh
# Everything that needs a GPU, on a machine that has one: correctness first, then speed.
#
#   sh tests/gpu/run.sh            results in gpu-results/, or in $OUT where that is set
#   sh tests/gpu/run.sh --dry      the same, small, on a CPU
#
# The machine needs Python 3.11 or later with torch 2.11, transformers, peft, safetensors, pyarrow, anyio, pytest and
# hypothesis of its own, and no network. What is missing there besides comes along in .gpu-wheels: `make gpu-wheels`.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
PACKAGES=.gpu-packages
if [ -d .gpu-wheels ] && ! "$PYTHON" -c "import pydantic" 2>/dev/null; then
    for wheel in .gpu-wheels/*.whl; do "$PYTHON" -m zipfile -e "$wheel" "$PACKAGES"; done
fi
export PYTHONPATH="$PACKAGES:.${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m tests.gpu "${OUT:-gpu-results}" "$@"
