#!/bin/sh
# Serves meta-llama/Llama-3.3-70B-Instruct on four cards. Arguments are flags of `gaudiserve serve`.
set -eu
gaudiserve presets meta-llama/Llama-3.3-70B-Instruct --device "${DEVICE:-gaudi3}" --cards "${CARDS:-4}" \
  --max-model-len "${MAX_MODEL_LEN:-4352}" > llama-3.3-70b.yaml
exec gaudiserve serve --config llama-3.3-70b.yaml "$@"
