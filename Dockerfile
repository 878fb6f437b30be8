# The library and its programs in an image. Nobody has built it yet.
#
#   docker build -t tff-meta .
#   docker run --rm -v "$PWD/runs:/srv/runs" tff-meta \
#       tff-meta-train --algorithm=frl
#
# With the CUDA libraries that TensorFlow loads (the driver is the machine's):
#
#   docker build --build-arg GPU=1 -t tff-meta:gpu .
#   docker run --rm --gpus all tff-meta:gpu tff-meta-train --algorithm=frl
#
# With Ray, for --execution=ray and the hosts of its clusters; GPU=1 goes with it:
#
#   docker build --build-arg RAY=1 -t tff-meta:ray .
FROM python:3.11-slim-bookworm

ARG GPU=
ARG RAY=

# The packages come first: they change less often than the code.
WORKDIR /opt/tff_meta
COPY requirements.txt requirements-gpu.txt requirements-ray.txt ./
# The constraint pins what builds the one package without a wheel.
RUN PIP_CONSTRAINT=requirements.txt pip install --no-cache-dir --use-pep517 \
      --no-deps -r requirements.txt \
    && if [ -n "$GPU" ]; then \
         pip install --no-cache-dir --no-deps -r requirements-gpu.txt; \
       fi \
    && if [ -n "$RAY" ]; then \
         pip install --no-cache-dir --no-deps -r requirements-ray.txt; \
       fi

COPY . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

WORKDIR /srv
CMD ["tff-meta-train", "--helpshort"]
