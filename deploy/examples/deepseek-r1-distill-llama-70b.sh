#!/bin/sh
# Serves deepseek-ai/DeepSeek-R1-Distill-Llama-70B on four cards. Arguments are flags of `gaudiserve serve`.
set -eu
gaudiserve presets deepseek-ai/DeepSeek-R1-Distill-Llama-70B --device "${DEVICE:-gaudi3}" --cards "${CARDS:-4}" \
  --max-model-len "${MAX_MODEL_LEN:-4352}" > deepseek-r1-distill-llama-70b.yaml
exec gaudiserve serve --config deepseek-r1-distill-llama-70b.yaml "$@"
