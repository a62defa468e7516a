# gptlab on a CPU:
#
#   docker build -t gptlab . && mkdir -p runs && docker run --rm -it -v "$PWD/runs:/work/runs" gptlab train
#
# Docker would make a missing runs/ as root, who alone could write there.
#
# GPUs: build with --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 and run with --gpus all.
FROM python:3.12-slim

# gptlab's kernels and torch.compile need a C++ compiler.
RUN apt-get update && apt-get install --no-install-recommends -y g++ git && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/
RUN pip install --no-cache-dir -c /tmp/constraints.txt torch --index-url "$TORCH_INDEX"

COPY pyproject.toml README.md LICENSE /src/
COPY gptlab /src/gptlab
RUN pip install --no-cache-dir -c /tmp/constraints.txt /src

# No root: run folders that are mounted belong to this user (`docker run --user "$(id -u)"` for another,
# which the cache is open to).
RUN useradd --create-home --uid 1000 gptlab && mkdir /work && chown gptlab /work && mkdir -m 1777 /cache
USER gptlab
WORKDIR /work
ENV GPTLAB_CACHE=/cache
ENTRYPOINT ["gptlab"]
CMD ["--help"]
