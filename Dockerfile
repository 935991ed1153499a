# An image that serves a model. Two targets:
#   docker build --target cpu  -t graft:cpu .
#   docker build --target cuda -t graft:cuda .
#   docker run --rm -p 8000:8000 -v graft-cache:/home/graft/.cache graft:cpu      # smollm2-135m, fetched once
#   docker run --rm --gpus all -p 8000:8000 -v /models:/models:ro graft:cuda /models/Qwen3-8B --api-key-file /run/secrets/keys
# Neither runs as root.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# the C++ compiler builds the native kernels on first use; Triton needs a C compiler on a GPU
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
 && useradd --system --create-home --uid 10001 graft
WORKDIR /opt/graft
COPY constraints.txt pyproject.toml README.md ./
COPY src ./src
COPY skills ./skills

FROM base AS cpu
RUN pip install -c constraints.txt --index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple torch \
 && pip install -c constraints.txt ".[serve,kv-events]"
USER graft
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=300s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["graft", "serve", "--host", "0.0.0.0"]

# torch from PyPI brings CUDA's libraries and its own Triton with it; the driver comes from the host. The version is the
# one that was measured on GPUs: constraints.txt has that of CPUs, and a Triton which that torch does not go with
FROM base AS cuda
ARG TORCH=2.11.0
RUN grep -v -E '^(torch|triton)==' constraints.txt > /tmp/cuda.txt \
 && pip install -c /tmp/cuda.txt "torch==${TORCH}" ".[serve,kv-events]" \
 && python -c "import triton"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER graft
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=600s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["graft", "serve", "--host", "0.0.0.0"]
