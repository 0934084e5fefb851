# The image of every deployment under deploy/:
#   docker build -t registry.example.com/runner:0.1.0 .
# BASE: any Debian or Ubuntu with Python 3.11 or newer and its venv module. PyPI's torch contains its CUDA libraries; the
# driver is the node's.
ARG BASE=python:3.11-slim
FROM ${BASE}

# Additional extras of pyproject.toml, separated by spaces: --build-arg EXTRAS=aim
ARG EXTRAS=""
# For a driver that is too old for the CUDA version of PyPI's torch:
#   --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126
# With either of them, what is installed is pinned by version; without, each file by its SHA-256.
ARG TORCH_INDEX=""
WORKDIR /opt/runner

# A fixed uid, because Kubernetes must know that it is not root.
RUN useradd --uid 1000 --user-group --create-home runner \
    && install --directory --owner=runner --group=runner /workspace

# Triton, which TRL's default loss and torch.compile use, compiles the launchers of its kernels at run time. Debian's own
# Python has its headers in a separate package. Any compiler version of the base's release works, so none is pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && include=$(python3 -c "import sysconfig; print(sysconfig.get_path('include'))") \
    && if [ -e "${include}/Python.h" ]; then headers=""; else headers=python3-dev; fi \
    && apt-get install --yes --no-install-recommends gcc libc6-dev ${headers:+"${headers}"} \
    && rm -rf /var/lib/apt/lists/*

# Dependencies are a separate layer, which changes only with pyproject.toml, constraints.txt or what is locked from them.
COPY pyproject.toml constraints.txt scripts/requirements.py requirements/image.txt ./
RUN python3 -m venv /opt/venv \
    && if [ -z "${EXTRAS}${TORCH_INDEX}" ]; then \
        set -- --require-hashes --requirement image.txt; \
    else \
        python3 requirements.py sft s3 nvidia quantization ${EXTRAS} >requirements.txt; \
        set -- --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} --requirement requirements.txt; \
    fi \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check "$@"

# The code is a small layer of a few hundred kilobytes.
COPY README.md LICENSE ./
COPY runner runner
COPY checkpointing checkpointing
RUN /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation . \
    && rm -r build resilient_training.egg-info
COPY deploy/configs configs
COPY deploy/kubernetes/kubeflow-start /usr/local/bin/

ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /workspace
# Exec form, so that `runner` itself is process 1 and gets SIGTERM.
ENTRYPOINT ["runner"]
CMD ["start"]
