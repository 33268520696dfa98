"""The numbers at ``/metrics``, in Prometheus' form."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """One server's metrics, in a registry of their own: two servers in one process do not mix."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("eata_requests", "Requests answered.", ["endpoint", "status"], registry=registry)
        self.latency = Histogram(
            "eata_request_seconds", "From a request's first byte to its answer.", ["endpoint"],
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.queue = Gauge("eata_queue_samples", "Samples that wait for the model.", registry=registry)
        self.batch = Histogram("eata_batch_samples", "Samples a batch.", buckets=SAMPLES, registry=registry)
        self.step = Histogram(
            "eata_batch_seconds", "To predict a batch and learn from it.", buckets=SECONDS, registry=registry
        )
        self.samples = Counter("eata_samples", "Samples predicted.", registry=registry)
        self.chosen = Counter("eata_chosen_samples", "Samples that took part in a step.", registry=registry)
        self.limited = Counter(
            "eata_limited_samples", "Samples predicted, but not learnt from: over their client's share.",
            registry=registry,
        )  # fmt: skip
        self.share = Gauge("eata_client_share", "Largest share of one client in the last batch.", registry=registry)
        self.steps = Counter("eata_steps", "Optimizer steps.", registry=registry)
        self.batches = Counter("eata_batches", "Batches predicted.", registry=registry)
        self.lost = Counter("eata_lost_batches", "Batches that a crash before this start took.", registry=registry)
        self.failures = Counter("eata_failures", "Batches and saves that failed.", ["what"], registry=registry)
        self.entropy = Gauge("eata_entropy_nats", "Mean entropy of the last batch's predictions.", registry=registry)
        self.drift = Gauge("eata_drift_nats", "How far clean predictions may have moved (K).", registry=registry)
        self.disagreement = Gauge(
            "eata_source_disagreement", "Share of the last compared samples that the source model puts elsewhere.",
            registry=registry,
        )  # fmt: skip
        self.alarms = Counter("eata_alarms", "Alarms of the guard.", registry=registry)
        self.version = Gauge("eata_version", "The version that is served.", registry=registry)
        self.kept = Gauge("eata_kept_versions", "Versions that can be gone back to.", registry=registry)
        self.frozen = Gauge("eata_frozen", "1 while adaptation is switched off.", registry=registry)

    def text(self) -> bytes:
        """What ``/metrics`` answers.

        >>> b"eata_steps_total 0.0" in Metrics().text()
        True
        """
        return generate_latest(self.registry)
