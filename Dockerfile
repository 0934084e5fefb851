# The image that every deployment under deploy/ runs:
#   docker build -t registry.example.com/runner:0.1.0 .
# BASE: any Debian or Ubuntu with Python 3.11 or newer and its venv module. PyPI's torch brings its own CUDA libraries;
# the driver is the machine's.
ARG BASE=python:3.11-slim
FROM ${BASE}

# Extras of pyproject.toml besides those that are always there, separated by spaces: --build-arg EXTRAS=aim
ARG EXTRAS=""
# For another CUDA than that of PyPI's torch, which needs a driver of its age:
#   --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126
ARG TORCH_INDEX=""
WORKDIR /opt/runner

# A fixed number, so that Kubernetes can tell that it is not root.
RUN useradd --uid 1000 --user-group --create-home runner \
    && install --directory --owner=runner --group=runner /workspace

# Triton compiles the launchers of its kernels on the machine: TRL's default loss and torch.compile need it. Debian's own
# Python, which a base may have in place of python.org's, keeps its headers in a package of their own.
# Any compiler of the base's release will do.
# hadolint ignore=DL3008
RUN apt-get update \
    && include=$(python3 -c "import sysconfig; print(sysconfig.get_path('include'))") \
    && if [ -e "${include}/Python.h" ]; then headers=""; else headers=python3-dev; fi \
    && apt-get install --yes --no-install-recommends gcc libc6-dev ${headers:+"${headers}"} \
    && rm -rf /var/lib/apt/lists/*

# Dependencies: cached until pyproject.toml or constraints.txt change.
COPY pyproject.toml constraints.txt scripts/requirements.py ./
RUN python3 requirements.py sft s3 nvidia quantization ${EXTRAS} >requirements.txt \
    && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} --requirement requirements.txt

# The code: some hundred kilobytes.
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
# Exec form: `runner` itself is process 1 and gets the SIGTERM.
ENTRYPOINT ["runner"]
CMD ["start"]
