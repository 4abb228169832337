#!/bin/sh
# Serves meta-llama/Llama-3.1-8B-Instruct on a card. Arguments are flags of `gaudiserve serve`.
set -eu
# In a clone, the command is in .venv unless it is on the PATH.
PATH=$PATH:$(dirname "$0")/../../.venv/bin
preset=${XDG_CACHE_HOME:-$HOME/.cache}/gaudiserve/llama-3.1-8b.yaml
mkdir -p -m 700 "${preset%/*}"
gaudiserve presets meta-llama/Llama-3.1-8B-Instruct --device "${DEVICE:-gaudi3}" --host-cards "${CARDS:-1}" \
  --max-model-len "${MAX_MODEL_LEN:-4352}" > "$preset"
exec gaudiserve serve --config "$preset" "$@"
