# The gateway's image. Any base with Python 3.11 to 3.13 will do: docker build --build-arg BASE=my-python .
# With wheels for that Python in build/wheels (scripts/gateway-image puts them there) the build needs no network.
ARG BASE=python:3.12-slim
FROM ${BASE}

COPY pyproject.toml build/wheel[s] /wheels/
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY manager /src/manager
COPY runtimes /src/runtimes
COPY gateway /src/gateway
COPY tangram /src/tangram
COPY client /src/client

# A wheel of pip is a program too: the base needs neither pip nor venv.
RUN set -eu; \
    if ls /wheels/pip-*.whl >/dev/null 2>&1; then \
        pip="python3 $(ls /wheels/pip-*.whl)/pip"; offline="--no-index --find-links /wheels --no-build-isolation"; \
        $pip install -q --root-user-action ignore --no-index --find-links /wheels --target /opt/build setuptools packaging; \
    else pip="python3 -m pip"; offline=""; fi; \
    PYTHONPATH=/opt/build $pip install -q --root-user-action ignore --no-cache-dir $offline \
        --constraint /src/constraints.txt --target /opt/tangram /src/client '/src[mcp,otel]'; \
    rm -rf /wheels /src /opt/build

ENV PYTHONPATH=/opt/tangram PATH=/opt/tangram/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 TANGRAM_STATE=/var/lib/tangram
# Reachable from outside, over a network that is trusted with tokens in clear text:
# docker run -e TANGRAM_HOST=0.0.0.0 -e TANGRAM_CLEAR_TEXT=true -e TANGRAM_TOKEN=... -p 127.0.0.1:8080:8080
# -v /var/run/docker.sock:/var/run/docker.sock -v my-functions:/etc/tangram/functions
# Without an engine there is no isolation in here: a configuration must ask for it by sandbox.provider: plain and plain_as_root: true.
# With --pid host -v /sys/fs/cgroup:/sys/fs/cgroup cores are granted by a write to a control group, and not by request.
WORKDIR /etc/tangram
COPY tangram.yaml /etc/tangram/
COPY functions/shell /etc/tangram/functions/shell
COPY functions/math_reward /etc/tangram/functions/math_reward
COPY functions/pytest_reward /etc/tangram/functions/pytest_reward
VOLUME /var/lib/tangram
EXPOSE 8080 8081
ENTRYPOINT ["python3", "-m", "gateway"]
CMD ["serve"]
