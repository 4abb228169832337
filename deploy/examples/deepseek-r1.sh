#!/bin/sh
# Serves deepseek-ai/DeepSeek-R1 on eight cards. Arguments are flags of `gaudiserve serve`.
set -eu
gaudiserve presets deepseek-ai/DeepSeek-R1 --device "${DEVICE:-gaudi3}" --cards "${CARDS:-8}" \
  --max-model-len "${MAX_MODEL_LEN:-16384}" > deepseek-r1.yaml
exec gaudiserve serve --config deepseek-r1.yaml "$@"
