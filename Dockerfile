# The daemon in a container; docs/install.md says how to run it. What decides what it is:
#   BASE         Debian or Ubuntu, with a Python of 3.11 or later among its packages. For a runner on NVIDIA cards one of
#                NVIDIA's, such as nvidia/cuda:12.8.1-base-ubuntu24.04; torch brings its own CUDA libraries.
#   EXTRAS       runner or transformers: a runner's image instead of the daemon's, which needs no torch
#   TORCH_INDEX  where torch's CPU build is, as for scripts/install.sh; without it torch is the CUDA build
#   UID          the user of the daemon; that of the runner must be the same
ARG BASE=ubuntu:24.04

FROM ${BASE} AS python
# The distribution's Python, of whatever patch release: a pinned one would be gone from the archive with the next.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends build-essential python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/sglcache
WORKDIR /src
COPY . .
ARG EXTRAS=""
ARG TORCH_INDEX=""
# As variables they hold for what the wheel is built with, too.
ENV PIP_CONSTRAINT=/src/deploy/constraints.txt \
    PIP_BUILD_CONSTRAINT=/src/deploy/constraints.txt
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/sglcache/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".${EXTRAS:+[$EXTRAS]}"

FROM python
LABEL org.opencontainers.image.title="sglcache" \
    org.opencontainers.image.description="A KV cache server for LLM inference" \
    org.opencontainers.image.licenses="Apache-2.0"
ARG UID=10001
# Group 0 may write as well, for platforms that choose the uid themselves.
RUN useradd --uid "$UID" --non-unique --gid 0 --no-create-home --home-dir /var/lib/sglcache --shell /usr/sbin/nologin sglcache \
    && install --directory --owner="$UID" --group=0 --mode=0770 /run/sglcache /var/lib/sglcache
COPY --from=build /opt/sglcache /opt/sglcache
COPY configs/container.toml /etc/sglcache/sglcache.toml
# SGLCACHE_SOCKET: for the daemon, and for every `sglcache` that is run in here.
ENV PATH=/opt/sglcache/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    SGLCACHE_CONFIG=/etc/sglcache/sglcache.toml \
    SGLCACHE_SOCKET=/run/sglcache/control.sock \
    XDG_STATE_HOME=/var/lib
# The control sockets, to be shared with the runner's container, and the numbers that must not go back.
VOLUME ["/run/sglcache", "/var/lib/sglcache"]
EXPOSE 5557 5657 30080
USER ${UID}
# A drain takes 15 s at most; give it 30: docker run --stop-timeout 30.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=6s --start-period=60s --retries=3 CMD ["sglcache", "health"]
ENTRYPOINT ["sglcache"]
CMD ["serve"]
