#!/bin/sh
# Serves deepseek-ai/DeepSeek-R1-Distill-Llama-70B on four cards. Arguments are flags of `gaudiserve serve`.
set -eu
# In a clone, the command is in .venv unless it is on the PATH.
PATH=$PATH:$(dirname "$0")/../../.venv/bin
preset=${XDG_CACHE_HOME:-$HOME/.cache}/gaudiserve/deepseek-r1-distill-llama-70b.yaml
mkdir -p -m 700 "${preset%/*}"
gaudiserve presets deepseek-ai/DeepSeek-R1-Distill-Llama-70B --device "${DEVICE:-gaudi3}" --host-cards "${CARDS:-4}" \
  --max-model-len "${MAX_MODEL_LEN:-4352}" > "$preset"
exec gaudiserve serve --config "$preset" "$@"
