#!/bin/sh
# Serves meta-llama/Llama-3.1-405B-Instruct on eight cards. Arguments are flags of `gaudiserve serve`.
set -eu
gaudiserve presets meta-llama/Llama-3.1-405B-Instruct --device "${DEVICE:-gaudi3}" --cards "${CARDS:-8}" \
  --max-model-len "${MAX_MODEL_LEN:-4352}" > llama-3.1-405b.yaml
exec gaudiserve serve --config llama-3.1-405b.yaml "$@"
