#!/bin/sh
# Serves deepseek-ai/DeepSeek-R1 on eight cards. Arguments are flags of `gaudiserve serve`.
set -eu
# In a clone, the command is in .venv unless it is on the PATH.
PATH=$PATH:$(dirname "$0")/../../.venv/bin
preset=${XDG_CACHE_HOME:-$HOME/.cache}/gaudiserve/deepseek-r1.yaml
mkdir -p -m 700 "${preset%/*}"
gaudiserve presets deepseek-ai/DeepSeek-R1 --device "${DEVICE:-gaudi3}" --host-cards "${CARDS:-8}" \
  --max-model-len "${MAX_MODEL_LEN:-16384}" > "$preset"
exec gaudiserve serve --config "$preset" "$@"
