#!/bin/sh
# Serves Qwen/Qwen2.5-72B-Instruct on four cards. Arguments are flags of `gaudiserve serve`.
set -eu
gaudiserve presets Qwen/Qwen2.5-72B-Instruct --device "${DEVICE:-gaudi3}" --cards "${CARDS:-4}" \
  --max-model-len "${MAX_MODEL_LEN:-4352}" > qwen2.5-72b.yaml
exec gaudiserve serve --config qwen2.5-72b.yaml "$@"
