#!/bin/sh
# Serves Qwen/Qwen2.5-VL-7B-Instruct on a card. Arguments are flags of `gaudiserve serve`.
set -eu
gaudiserve presets Qwen/Qwen2.5-VL-7B-Instruct --device "${DEVICE:-gaudi3}" --cards "${CARDS:-1}" \
  --max-model-len "${MAX_MODEL_LEN:-8192}" > qwen2.5-vl-7b.yaml
exec gaudiserve serve --config qwen2.5-vl-7b.yaml "$@"
