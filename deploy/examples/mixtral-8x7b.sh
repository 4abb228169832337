#!/bin/sh
# Serves mistralai/Mixtral-8x7B-Instruct-v0.1 on two cards. Arguments are flags of `gaudiserve serve`.
set -eu
gaudiserve presets mistralai/Mixtral-8x7B-Instruct-v0.1 --device "${DEVICE:-gaudi3}" --cards "${CARDS:-2}" \
  --max-model-len "${MAX_MODEL_LEN:-4352}" > mixtral-8x7b.yaml
exec gaudiserve serve --config mixtral-8x7b.yaml "$@"
