"""Metrics of the requests of an engine, counted by an API server."""

from collections.abc import Sequence

from server.metrics.counters import Counter, Histogram, Registry

LABELS = ("model_name", "engine")
FINISH_REASONS = ("stop", "length", "abort", "error")
TIMEOUT_STATES = ("waiting", "running")
PRIORITIES = ("first", "default", "later")
PREFIX_CACHES = ("vllm:prefix_cache", "vllm:gpu_prefix_cache")
"""Current metric name, and vLLM's former name, which routers and dashboards still use."""

_MINUTES = (160.0, 640.0, 2560.0)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
TTFT_S = (*_TTFT_S, 10.0, 20.0, 40.0, 80.0, *_MINUTES)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
TOKEN_S = (*_TOKEN_S, 10.0, 20.0, 40.0, 80.0, *_MINUTES)
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
REQUEST_S = (*_REQUEST_S, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)


def counts_up_to(maximum: int) -> list[float]:
    """Bucket bounds 1, 2, 5, 10, ... up to `maximum`."""
    steps: list[float] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > maximum:
                return steps or [1.0]
            steps.append(float(digit * power))
        power *= 10


class RequestMetrics:
    """Counters and times of requests, labelled by engine. Used on a single thread."""

    def __init__(self, registry: Registry, model_name: str, engine: int) -> None:
        self._registry = registry
        self._labels = (model_name, str(engine))
        self._sizes: dict[str, Histogram] = {}
        self._add_counters()
        self._add_times()

    def _add_counters(self) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests.")
        self._cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that were found in the prefix cache."
        )
        self._prefix_queries = [
            self._counter(f"{name}_queries", "Prompt tokens looked up in the prefix cache.")
            for name in PREFIX_CACHES
        ]
        self._prefix_hits = [
            self._counter(f"{name}_hits", "Prompt tokens found in the prefix cache.")
            for name in PREFIX_CACHES
        ]
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        finished = self._registry.counter(
            "vllm:request_success", "Sequences that ended, by reason.", (*LABELS, "finished_reason")
        )
        # Create the series before the first scrape, so that a rate includes the first event.
        self._finished = {
            reason: finished.labels(*self._labels, reason) for reason in FINISH_REASONS
        }

        timeouts = self._registry.counter(
            "gaudiserve:request_timeouts",
            "Requests that were ended by their timeout, by their state at that time.",
            (*LABELS, "state"),
        )
        self._timeouts = {state: timeouts.labels(*self._labels, state) for state in TIMEOUT_STATES}

    def timed_out(self, *, has_started: bool) -> None:
        """Count a request that timed out."""
        self._timeouts[TIMEOUT_STATES[has_started]].inc()

    def waited(self, queue_s: float, priority: int) -> None:
        """Observe the queue time of a request."""
        self.queue_time.observe(queue_s)
        self._queue_times[1 + (priority > 0) - (priority < 0)].observe(queue_s)

    def _add_times(self) -> None:
        def times(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            return self._histogram(f"vllm:{name}_seconds", text, bounds)

        self.time_to_first_token = times(
            "time_to_first_token", "Time from the request's arrival to its first token.", TTFT_S
        )
        self.inter_token_latency = times(
            "inter_token_latency",
            "Time between two consecutive steps that produced tokens of a sequence.",
            TOKEN_S,
        )
        # vLLM's former name of the same histogram, which dashboards still use; observed once.
        former = self._registry.histogram(
            "vllm:time_per_output_token_seconds",
            "The same as inter_token_latency_seconds.",
            LABELS,
            TOKEN_S,
        )
        former.series[self._labels] = self.inter_token_latency
        self.time_per_output_token = times(
            "request_time_per_output_token",
            "Mean time per output token of a request, without the first token.",
            TOKEN_S,
        )
        self.e2e_latency = times(
            "e2e_request_latency", "Time from the request's arrival to its end.", REQUEST_S
        )
        self.queue_time = times("request_queue_time", "Spent in the waiting queue.", REQUEST_S)
        by_priority = self._registry.histogram(
            "gaudiserve:priority_queue_seconds",
            "Time in the waiting queue, by whether the request's priority is below 0, 0 or "
            "above 0.",
            (*LABELS, "priority"),
            REQUEST_S,
        )
        self._queue_times = [by_priority.labels(*self._labels, name) for name in PRIORITIES]
        self.prefill_time = times("request_prefill_time", "Time of the prefill.", REQUEST_S)
        self.decode_time = times(
            "request_decode_time", "Time from the first token to the last.", REQUEST_S
        )
        self.inference_time = times(
            "request_inference_time", "Time of prefill and decode.", REQUEST_S
        )

    def add_sizes(self, max_model_len: int) -> None:
        """Add the histograms of request sizes. Call it when the context length is known, where
        most of their buckets end."""
        for name, text in (
            ("request_prompt_tokens", "Prompt tokens of a request."),
            ("request_generation_tokens", "Tokens generated for a sequence."),
            ("request_max_num_generation_tokens", "Tokens of a request's longest sequence."),
            ("request_params_n", "n of a request."),
            ("request_params_max_tokens", "max_tokens of a request."),
        ):
            largest = 128 if name == "request_params_n" else max_model_len
            self._sizes[name] = self._histogram(f"vllm:{name}", text, counts_up_to(largest))

    def prompt_processed(self, num_tokens: int, num_cached: int) -> None:
        """Count the prompt tokens and cached tokens of a request, once for any n. The engine's own
        count grows with n, since it looks up the prompt for every choice."""
        self._prompt_tokens.inc(num_tokens)
        self._cached_tokens.inc(num_cached)
        for queries, hits in zip(self._prefix_queries, self._prefix_hits, strict=True):
            queries.inc(num_tokens)
            hits.inc(num_cached)

    def observe_size(self, name: str, value: int) -> None:
        """Observe `value` in the histogram `name`, such as request_prompt_tokens."""
        self._sizes[name].observe(value)

    def sequence_ended(self, reason: str, count: int = 1) -> None:
        """Count sequences that ended with `reason`: stop, length, abort or error."""
        self._finished[reason].inc(count)

    def _counter(self, name: str, text: str) -> Counter:
        return self._registry.counter(name, text, LABELS).labels(*self._labels)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return self._registry.histogram(name, text, LABELS, bounds).labels(*self._labels)
