# eata serve, on CPU. Not built by this project's own tests: no container engine runs there. See docs/serve.md.
FROM python:3.12-slim

WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir '.[serve]' && rm -rf /build

RUN useradd --system --create-home eata && mkdir /state && chown eata /state
USER eata
WORKDIR /home/eata
VOLUME /state
EXPOSE 8000
# SIGTERM drains the queue and saves; give it longer than --timeout: docker stop --time 60
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=120s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/v2/health/ready')"]
# Without EATA_TOKEN anybody who reaches the port may send images, and nobody may roll back.
ENTRYPOINT ["eata", "serve", "--host", "0.0.0.0"]
