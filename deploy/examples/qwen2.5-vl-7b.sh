#!/bin/sh
# Serves Qwen/Qwen2.5-VL-7B-Instruct on a card. Arguments are flags of `gaudiserve serve`.
set -eu
# In a clone, the command is in .venv unless it is on the PATH.
PATH=$PATH:$(dirname "$0")/../../.venv/bin
preset=${XDG_CACHE_HOME:-$HOME/.cache}/gaudiserve/qwen2.5-vl-7b.yaml
mkdir -p -m 700 "${preset%/*}"
gaudiserve presets Qwen/Qwen2.5-VL-7B-Instruct --device "${DEVICE:-gaudi3}" --host-cards "${CARDS:-1}" \
  --max-model-len "${MAX_MODEL_LEN:-8192}" > "$preset"
exec gaudiserve serve --config "$preset" "$@"
