# docker build -t gaudiserve:cpu .
# docker run --rm -p 127.0.0.1:8000:8000 -e GAUDISERVE_API_KEY=secret -v gaudiserve-cache:/cache gaudiserve:cpu
#
# The CPU back end, for x86-64. Dockerfile.hpu is for Gaudi. Built with buildah over Debian 12 and
# its Python 3.11, not yet with Docker. A test runs the installation in a separate environment.
# An exact version, so that every build has the same base.
ARG PYTHON=3.11.14
ARG BASE_IMAGE=python:${PYTHON}-slim-bookworm

FROM ${BASE_IMAGE} AS install
# A package index instead of pypi.org. Do not use a password: the image's history shows arguments.
ARG PIP_INDEX_URL
# A package index for torch. If it is empty, deploy/torch_build.py selects the CPU build.
ARG TORCH_INDEX=
# Further extras, for example `,otel`.
ARG EXTRAS=
WORKDIR /src
COPY . .
RUN set -eu; \
    python3 -m venv /opt/gaudiserve; \
    torch=$(/opt/gaudiserve/bin/python deploy/torch_build.py ${TORCH_INDEX:+--index "$TORCH_INDEX"}); \
    /opt/gaudiserve/bin/python -m pip install --no-cache-dir $torch ".[cpu${EXTRAS}]"; \
    /opt/gaudiserve/bin/python deploy/package_names.py; \
    /opt/gaudiserve/bin/gaudiserve vllm-command

FROM ${BASE_IMAGE}
# The first start compiles the kernels for its machine, into /cache.
# Not needed with a BASE_IMAGE that has g++.
RUN command -v g++ \
    || { apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*; }
COPY --from=install /opt/gaudiserve /opt/gaudiserve
ENV PATH=/opt/gaudiserve/bin:$PATH \
    XDG_CACHE_HOME=/cache \
    GAUDISERVE_HOST=0.0.0.0
RUN useradd --create-home --uid 10001 --user-group gaudiserve \
    && install -d -o gaudiserve -g gaudiserve /cache
COPY deploy/healthcheck.py /opt/
# A numeric user id, which runAsNonRoot of Kubernetes requires.
USER 10001
WORKDIR /home/gaudiserve
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=6s --start-period=60s --retries=3 \
    CMD ["python3", "/opt/healthcheck.py"]
ENTRYPOINT ["gaudiserve"]
CMD ["serve"]
