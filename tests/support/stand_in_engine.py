"""A scheduler without a model, whose tokens are chosen by the test."""

from collections import deque

import numpy as np

from vllm_mp.config import SchedulerConfig
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.block_pool import BlockPool, root_hash
from vllm_mp.core.scheduler.invariants import check_invariants
from vllm_mp.core.scheduler.pause import Pause
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.scheduler import Scheduler
from vllm_mp.core.worker.logits_processors import LogitsProcessors
from vllm_mp.core.worker.sampler import NO_TOKEN
from vllm_mp.core.worker.sleep import Sleep
from vllm_mp.pooling_params import PoolingParams
from vllm_mp.sampling_params import SamplingParams

EOS = 2
BLOCK = 4


class Memory:
    """What a core gives up when it sleeps, by where it is."""

    def __init__(self, forget):
        """`forget` is called when the cache is dropped."""
        self.weights, self.cache, self.prepared = "device", True, True
        self.fails: dict[str, Exception] = {}
        """Of the operations named, the next one."""
        self._forget = forget

    def offload_weights(self):
        self._try("offload_weights")
        if self.weights == "device":
            self.weights = "host"

    def drop_weights(self):
        self.weights = "disk"

    def restore_weights(self):
        self._try("restore_weights")
        self.weights = "device"

    def drop_cache(self):
        self.cache = self.prepared = False
        self._forget()

    def restore_cache(self):
        self._try("restore_cache")
        self.cache = True

    def prepare(self):
        assert (self.weights, self.cache) == ("device", True)
        self._try("prepare")
        self.prepared = True

    def _try(self, name):
        if name in self.fails:
            raise self.fails.pop(name)

    @property
    def is_whole(self):
        return (self.weights, self.cache, self.prepared) == ("device", True, True)


class Engine:
    """A scheduler and what it owns, with `ahead` steps in flight while the next is scheduled."""

    def __init__(self, num_blocks=100, max_num_seqs=8, budget=32, max_model_len=64, ahead=0, **config):
        settings = {
            "max_num_partial_prefills": 1,
            "enable_chunked_prefill": True,
            "policy": "fcfs",
            "stream_interval": 1,
        }
        self.batch = Batch(max_num_seqs, max_model_len, BLOCK, [EOS])
        self.pool = BlockPool(num_blocks + 1)
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **{**settings, **config}
        )
        self.scheduler = Scheduler(self.config, self.batch, self.pool, BLOCK)
        self.pause = Pause(self.scheduler, self.end)
        self.states = []
        """What sleeping and waking up has been noted as."""
        self.memory = Memory(lambda: self.contents.clear())
        self.sleep = Sleep(self.scheduler, self.memory, self.end, self.states.append)
        self.ahead = ahead
        self.in_flight = deque()
        """(step, tokens and vectors that it will bring), oldest first."""
        self.latest: dict[int, int] = {}
        """What the device has sampled last, by row: the scheduler may not know it yet."""
        self.contents: dict[int, list[int]] = {}
        """What the model has written: the tokens up to and including each block."""
        self.max_model_len = max_model_len
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}

    def add(
        self,
        slot,
        num_prompt_tokens=5,
        max_tokens=8,
        priority=0,
        prompt=None,
        salt="",
        reads_cache=True,
        pooled=False,
        output=(),
        isolate_until_num_tokens=0,
        **params,
    ):
        """`salt` None: a request that shares nothing. `pooled`: one for a vector, which has no answer.

        `output` are tokens of the answer that an earlier engine gave.
        """
        tokens = (
            np.arange(num_prompt_tokens, dtype=np.int32) + 100 * (slot + 1)
            if prompt is None
            else np.array(prompt, np.int32)
        )
        num_prompt_tokens = len(tokens)
        tokens = np.concatenate([tokens, np.array(output, np.int32)])
        if len(output):
            self.outputs[slot] = list(output)
        request = Request(
            client=0,
            slot=slot,
            request_id=str(slot),
            params=SamplingParams(max_tokens=max_tokens, seed=1, **params),
            tokens=tokens,
            num_prompt_tokens=num_prompt_tokens,
            max_total_tokens=num_prompt_tokens if pooled else min(self.max_model_len, num_prompt_tokens + max_tokens),
            hashes=[] if salt is None else [root_hash(salt)],
            reads_cache=reads_cache,
            order=self.scheduler.order_of(priority),
            pooling=PoolingParams() if pooled else None,
            isolate_until_num_tokens=isolate_until_num_tokens,
        )
        request.logits_processors = LogitsProcessors.from_params(request.params, [])
        self.scheduler.add(request)
        return request

    def step(self, token=7, failing=()):
        """Launch a step that gives each row `token` or a vector, but those of slots `failing`, and book what is due.

        The step, or what was booked instead if there was none to launch; None without work. `token` may be a function
        of slot and position.
        """
        step = self.scheduler.schedule()
        if step is not None:
            self.check_suspects(step)
            self.launch(step, token if callable(token) else lambda slot, position: token, failing)
        booked = self.finish_all_but(self.ahead if step is not None else 0)
        self.pause.settle()
        check_invariants(self.scheduler)
        return booked if step is None else step

    def launch(self, step, token, failing):
        assert self.memory.is_whole, "nothing is computed without weights and cache"
        self.compute(step)
        assert not self.batch.reads_answer[step.rows[step.awaits]].any(), "rules see the whole answer"
        rows = step.rows[step.samples]
        positions = self.batch.num_tokens[rows] - self.batch.num_prompt_tokens[rows]
        tokens = [
            NO_TOKEN if slot in failing else token(slot, position)
            for slot, position in zip(self.batch.slot[rows].tolist(), positions.tolist(), strict=True)
        ]
        self.latest |= zip(rows.tolist(), tokens, strict=True)
        slots = self.batch.slot[step.rows[step.pools]].tolist()
        vectors = [np.full(2, np.nan if slot in failing else 1, np.float32) for slot in slots]
        self.scheduler.launched(step)
        self.in_flight.append((step, np.array(tokens, np.int64), vectors))

    def finish_all_but(self, count):
        """Book the steps in flight but for the last `count`; one of them, or None."""
        booked = None
        while len(self.in_flight) > count:
            booked, tokens, vectors = self.in_flight.popleft()
            result = self.scheduler.update(booked, tokens, vectors)
            for slot, tok, position in zip(result.slots, result.tokens, result.positions, strict=True):
                output = self.outputs.setdefault(int(slot), [])
                assert position == len(output), "positions are consecutive"
                assert int(slot) not in self.ends, "nothing comes after the end"
                output.append(int(tok))
            assert not {(client, slot) for client, slot, _ in result.vectors} & result.gone
            self.end(result.finished)
        return booked

    def check_suspects(self, step):
        """A suspect is alone in its step, and while one may run nothing else does."""
        in_step = [self.batch.request(row).isolate_until_num_tokens > 0 for row in step.rows.tolist()]
        in_line = any(request.isolate_until_num_tokens for _, request in self.scheduler._waiting if not request.aborted)
        assert in_step == [True] or not (in_line or any(in_step))

    def end(self, ends):
        for _, end in ends:
            assert end.num_output_tokens == len(self.outputs.get(end.slot, []))
            assert end.slot not in self.ends, "a request ends once"
            self.ends[end.slot] = end.reason

    def compute(self, step):
        """Write the step's blocks as each layer of a model does, then see to it that all that its rows read is there.

        A layer writes for all rows before it reads for any.
        """
        rows = []
        for place, (row, count) in enumerate(zip(step.rows.tolist(), step.counts.tolist(), strict=True)):
            tokens, done = self.batch.token_ids[row].tolist(), int(self.batch.num_computed_tokens[row])
            if place in step.awaits:
                assert (place < step.num_decodes, count) == (True, 1)
                tokens[done] = self.latest[row]
            assert NO_TOKEN not in tokens[: done + count] or place in step.awaits
            rows.append((tokens, self.batch.block_table[row].tolist(), done, done + count))
        for tokens, blocks, done, end in rows:
            for block in range(done // BLOCK, -(-end // BLOCK)):
                self.contents[blocks[block]] = tokens[: min(end, (block + 1) * BLOCK)]
        for tokens, blocks, _, end in rows:
            for block in range(-(-end // BLOCK)):
                until = min(end, (block + 1) * BLOCK)
                assert self.contents[blocks[block]][:until] == tokens[:until]

    def pause_for(self, mode, clears_cache):
        """Pause, and have the model forget its cache where the pause forbids to use it; the answer to come."""
        self.finish_all_but(0)
        done = self.pause.pause(mode, clears_cache)
        if clears_cache:
            done.add_done_callback(lambda done: done.exception() or self.contents.clear())
        return done

    def settle_sleep(self):
        """Carry out the calls of `sleep` that are due."""
        self.finish_all_but(0)
        self.sleep.settle()
        check_invariants(self.scheduler)

    def run(self, token=7):
        for _ in range(10_000):
            if self.step(token) is None:
                return
        raise AssertionError("the scheduler does not come to an end")
