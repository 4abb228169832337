#!/bin/sh
# Serves meta-llama/Llama-3.1-8B-Instruct on a card. Arguments are flags of `gaudiserve serve`.
set -eu
gaudiserve presets meta-llama/Llama-3.1-8B-Instruct --device "${DEVICE:-gaudi3}" --cards "${CARDS:-1}" \
  --max-model-len "${MAX_MODEL_LEN:-4352}" > llama-3.1-8b.yaml
exec gaudiserve serve --config llama-3.1-8b.yaml "$@"
