# A coordinator, without torch: docker build -f deploy/docker/coordinator.Dockerfile -t atoll-coordinator .
# PIP_ARGS: for an index of one's own.
FROM python:3.11-slim AS build
ARG PIP_ARGS=""
# Of atoll; without it, what pyproject.toml has for copies without git.
ARG VERSION=""
WORKDIR /src
COPY . .
# hadolint ignore=SC2086
RUN export SETUPTOOLS_SCM_PRETEND_VERSION_FOR_ATOLL="${VERSION}" \
    && python -m venv /opt/atoll \
    && /opt/atoll/bin/python -m pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt .

FROM python:3.11-slim
COPY --from=build /opt/atoll /opt/atoll
ENV PATH=/opt/atoll/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/atoll atoll \
    && mkdir -p /etc/atoll /shared && chown atoll: /shared
USER 10001
WORKDIR /var/lib/atoll
VOLUME /var/lib/atoll
EXPOSE 7700 7701
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=12s --start-period=20s CMD ["atoll", "health", "--store", "/var/lib/atoll/run.db"]
ENTRYPOINT ["atoll"]
CMD ["coordinator", "/etc/atoll/run.toml", "--store", "/var/lib/atoll/run.db", "--listen", "0.0.0.0:7700"]
