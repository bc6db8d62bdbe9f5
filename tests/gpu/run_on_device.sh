#!/usr/bin/env bash
# Runs the gpu tests, then times a step, on a throw-away machine whose python3 has a
# CUDA build of torch. What else is needed comes as wheels, in the folder named first.
set -euo pipefail
cd "$(dirname "$0")/../.."
install=(python3 -m pip install --quiet --no-index --no-deps --no-build-isolation)
"${install[@]}" "$1"/*.whl
"${install[@]}" --editable .
python3 -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
python3 -m pytest tests/gpu -v --durations=10 -p no:cacheprovider
python3 -m tests.gpu.time_cuda_step
