#!/usr/bin/env bash
# Remakes everything under assets/ from assets/source/: tokenizer, pretrained tiny model, reverse-text data.
# About 15 minutes on two cores (measured in docs/benchmarks.md).
# usage: tools/make_assets.sh [WORK_DIR]
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:-outputs/make_assets}
mkdir -p "$work"

cargo run --release --example make_assets -- assets/source "$work"
cargo run --release -- sft @ configs/pretrain_tiny.toml --device flex \
    --model.name "$work/untrained" --data.name "$work/pretrain" \
    --val.data.name "$work/held_out.jsonl" --output-dir "$work/run" --clean-output-dir

rm -rf assets/tiny assets/reverse-text
mkdir -p assets/tiny
for file in config.json model.safetensors tokenizer.json tokenizer_config.json; do
    cp "$work/run/weights/step_1500/$file" assets/tiny/
done
cp -r "$work/reverse-text" assets/
ls -l assets/tiny assets/reverse-text
