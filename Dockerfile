# The image that every deployment under deploy/ runs:
#   docker build -t registry.example.com/runner:0.1.0 .
# BASE: any image with Python 3.11 or newer and its venv module. PyPI's torch brings its own CUDA libraries; the driver
# is the machine's.
ARG BASE=python:3.11-slim
FROM ${BASE}

# Extras of pyproject.toml besides sft and s3, separated by spaces: --build-arg EXTRAS=aim
ARG EXTRAS=""
WORKDIR /opt/runner

# A fixed number, so that Kubernetes can tell that it is not root.
RUN useradd --uid 1000 --user-group --create-home runner \
    && install --directory --owner=runner --group=runner /workspace

# Dependencies: cached until pyproject.toml or constraints.txt change.
COPY pyproject.toml constraints.txt scripts/requirements.py ./
RUN python3 requirements.py sft s3 ${EXTRAS} >requirements.txt \
    && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt \
        --requirement requirements.txt

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
