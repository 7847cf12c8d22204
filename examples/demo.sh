#!/bin/sh
# The main job on this machine: plan on fake tensors, read the plan, train it on 2 CPU processes, compare the loss.
# `make demo` sets BIN to the environment's programs.
set -eu
BIN=${BIN:-.venv/bin}
OUT=$(mktemp -d)
trap 'rm -rf "$OUT"' EXIT
run() { printf '\n$ %s\n' "$(echo "$*" | sed "s#$BIN/##g; s#$OUT/##g")"; "$@"; }

run "$BIN/autoshard" plan examples/tiny_llama.py -o "$OUT/plan.json" --device cpu --devices 2 --memory 256MiB
run "$BIN/autoshard" inspect "$OUT/plan.json"
run "$BIN/torchrun" --nproc-per-node 2 examples/train.py --plan "$OUT/plan.json" --check
run "$BIN/autoshard" plan examples/llama_8b.py -o "$OUT/llama.json" --device h100-80gb --devices 8
