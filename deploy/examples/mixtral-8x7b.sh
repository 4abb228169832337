#!/bin/sh
# Serves mistralai/Mixtral-8x7B-Instruct-v0.1 on two cards. Arguments are flags of `gaudiserve serve`.
set -eu
# In a clone, the command is in .venv unless it is on the PATH.
PATH=$PATH:$(dirname "$0")/../../.venv/bin
preset=${XDG_CACHE_HOME:-$HOME/.cache}/gaudiserve/mixtral-8x7b.yaml
mkdir -p -m 700 "${preset%/*}"
gaudiserve presets mistralai/Mixtral-8x7B-Instruct-v0.1 --device "${DEVICE:-gaudi3}" --host-cards "${CARDS:-2}" \
  --max-model-len "${MAX_MODEL_LEN:-4352}" > "$preset"
exec gaudiserve serve --config "$preset" "$@"
