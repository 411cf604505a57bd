# A node, with its trainer: docker build -f deploy/docker/node.Dockerfile -t atoll-node .
# For CUDA, begin from an image that has torch: --build-arg BASE=pytorch/pytorch:2.9.1-cuda13.0-cudnn9-runtime
# --build-arg EXTRA="" --build-arg SITE_PACKAGES=--system-site-packages. PIP_ARGS: for an index of one's own, such as
# that of torch for the CPU alone.
ARG BASE=python:3.11-slim
# hadolint ignore=DL3006
FROM ${BASE}
ARG EXTRA="[node]"
ARG SITE_PACKAGES=""
ARG PIP_ARGS=""
# Of atoll; without it, what pyproject.toml has for copies without git.
ARG VERSION=""
WORKDIR /src
COPY . .
# hadolint ignore=SC2086
RUN export SETUPTOOLS_SCM_PRETEND_VERSION_FOR_ATOLL="${VERSION}" \
    && python3 -m venv ${SITE_PACKAGES} /opt/atoll \
    && /opt/atoll/bin/python -m pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt ".${EXTRA}" numpy numba safetensors \
    && rm -rf /src
ENV PATH=/opt/atoll/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/atoll atoll
USER 10001
WORKDIR /var/lib/atoll
VOLUME /var/lib/atoll
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=12s --start-period=120s CMD ["atoll", "health", "--node", "/var/lib/atoll/home"]
ENTRYPOINT ["atoll"]
CMD ["node", "--home", "/var/lib/atoll/home"]
