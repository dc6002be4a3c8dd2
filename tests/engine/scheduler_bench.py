"""A scheduler over a fake worker, driven by hand: what the scheduler's tests are written with."""

from __future__ import annotations

from collections.abc import Callable

from fake_worker import EOS_IDS, FakeWorker, run_alone

from tokenspeed.batch import Batch, Row
from tokenspeed.engine.record import Request
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.kv.manager import KVManager
from tokenspeed.kv.specs import CacheGroup, FullAttention
from tokenspeed.request import GenerateRequest, RequestDelta, SamplingParams

GROUP = CacheGroup(FullAttention(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0), (0,))


class Bench:
    """A scheduler over a fake worker, with `depth` steps in flight."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        token_budget: int = 16,
        max_model_len: int | None = None,
        tokens_per_step: int = 1,
        prefill_first: bool = False,
        depth: int = 0,
        cache: bool = True,
        accept: Callable[[Row], int] = lambda row: row.num_tokens if row.decode else 1,
        fails: Callable[[Row], bool] = lambda row: False,
    ) -> None:
        self.kv = KVManager([GROUP], num_pages, block_size, cache)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            max_model_len=max_model_len or min(256, num_pages * block_size),
            tokens_per_step=tokens_per_step,
            prefill_first=prefill_first,
        )
        self.worker = FakeWorker(
            num_slots=max_num_seqs,
            num_groups=1,
            num_pages=num_pages,
            block_size=block_size,
            accept=accept,
            fails=fails,
        )
        self.depth = depth
        self.requests: dict[str, Request] = {}
        self.deltas: list[RequestDelta] = []

    def add(
        self,
        name: str,
        prompt: list[int],
        *,
        seed: int = 0,
        priority: int = 0,
        **params: object,
    ) -> Request:
        params.setdefault("ignore_eos", True)
        spec = GenerateRequest(
            id=name,
            prompt_ids=prompt,
            params=SamplingParams(**params),  # type: ignore[arg-type]
            seed=seed,
            priority=priority,
        )
        request = Request(spec, eos_ids=EOS_IDS)
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def launch(self) -> Batch | None:
        batch = self.scheduler.schedule()
        if batch is not None:
            self.worker.launch(batch)
        self.scheduler.check()
        return batch

    def commit(self) -> list[RequestDelta]:
        deltas = self.scheduler.commit(self.worker.result())
        self.scheduler.check()
        self.deltas += deltas
        return deltas

    def step(self) -> Batch | None:
        batch = self.launch()
        while len(self.worker.in_flight) > (0 if batch is None else self.depth):
            self.commit()
        return batch

    def run(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work and self.kv.usage == 0.0

    def tokens(self, name: str) -> list[int]:
        return [t for delta in self.deltas if delta.request_id == name for t in delta.token_ids]

    def last(self, name: str) -> RequestDelta:
        return [delta for delta in self.deltas if delta.request_id == name][-1]

    def assert_alone(self, name: str) -> None:
        request = self.requests[name]
        assert self.tokens(name) == run_alone(request.spec, request.max_tokens)[0]
