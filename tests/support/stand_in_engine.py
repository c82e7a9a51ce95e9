"""A scheduler without a model: the test chooses the tokens."""

import time
from typing import NamedTuple

import numpy as np
import torch

from support.drafts import EagerPace
from vllm_mp.config import SchedulerConfig
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.cache.block_pool import root_hash
from vllm_mp.core.scheduler.cache.kv_cache_manager import KVCacheManager
from vllm_mp.core.scheduler.invariants import check_invariants
from vllm_mp.core.scheduler.logits_processors import LogitsProcessors
from vllm_mp.core.scheduler.pause import Pause
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.scheduler import Scheduler
from vllm_mp.core.scheduler.step import ModelOutput
from vllm_mp.core.scheduler.waiting.memory_quota import REQUEST_BYTES
from vllm_mp.core.worker.memory.sleep import Sleep
from vllm_mp.core.worker.sampling.sampler import NO_TOKEN
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.sampling_params import SamplingParams

EOS = 2
OTHER_EOS = 9000
"""An end-of-sequence token that is not the tokenizer's own."""
BLOCK = 4


class ReadyOutput(NamedTuple):
    """The handle of an output that is already computed."""

    output: ModelOutput

    def wait(self):
        return self.output


class Memory:
    """A stand-in for the memory that a core releases when it sleeps; it records where that memory is."""

    def __init__(self, forget):
        """`forget` is called when the KV cache is dropped."""
        self.weights, self.cache, self.prepared = "device", True, True
        self.fails: dict[str, Exception] = {}
        """The error of the next call of an operation, by its name."""
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
    """A scheduler and what it owns, with `ahead` steps pending while the next step is scheduled."""

    def __init__(
        self,
        num_blocks=100,
        max_num_seqs=8,
        budget=32,
        max_model_len=64,
        ahead=0,
        adapters=None,
        num_stages=1,
        clock=time.perf_counter,
        table=None,
        contents=None,
        file=None,
        speculation=None,
        **config,
    ):
        """`adapters` are the `AdapterTurns`, if requests have adapters. `clock` times the steps, in seconds.

        `table` is the `SealTable`, and `contents` what an earlier model has written, as the attribute. `file` reads
        blocks of the prefix cache file. With `speculation`, a `SpeculativeConfig`, all that is proposed is drafted.
        """
        settings = {
            "max_num_partial_prefills": 1,
            "enable_chunked_prefill": True,
            "policy": "fcfs",
            "stream_interval": 1,
        }
        self.batch = Batch(max_num_seqs, max_model_len, BLOCK, [EOS, OTHER_EOS], unnamed_eos_token_id=EOS)
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **{**settings, **config}
        )
        self.cache = KVCacheManager(self.batch, num_blocks + 1, BLOCK, table, file)
        self.pool = self.cache.pool
        self.scheduler = Scheduler(self.config, self.batch, self.cache, adapters, num_stages, clock, speculation)
        self.max_drafts = 0 if speculation is None else speculation.num_speculative_tokens
        if speculation is not None:
            self.scheduler.drafting._pace = EagerPace()
        self.pauses = []
        """(mode, number of requests that may still run) of each pause that was noted."""
        self.pause = Pause(self.scheduler, self.end, lambda *state: self.pauses.append(state))
        self.states = []
        """Each `SleepState` that was noted."""
        self.memory = Memory(lambda: self.contents.clear())
        self.sleep = Sleep(self.scheduler, self.memory, self.end, self.states.append)
        self.ahead = ahead
        self.num_launched = 0
        self.latest_is_isolated = False
        self.latest: list[int] = []
        """The tokens that the device sampled last; the scheduler may not know them yet."""
        self.contents: dict[int, list[int]] = {} if contents is None else contents
        """What the model has written, by block: the tokens up to and including the block's."""
        self.max_model_len = max_model_len
        self.outputs: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.stop_reasons: dict[int, int | None] = {}
        self.slices: list[int] = []
        """The slot of the request for which each slice of an image was encoded."""
        self.queue_times: dict[int, float] = {}

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
        isolation_group=None,
        client=0,
        owner="",
        tenant=0,
        after_pause=False,
        is_replay=False,
        adapter=None,
        arrival_time=0.0,
        images=None,
        **params,
    ):
        """Add a request. It shares nothing if `salt` is None, and is a pooling request if `pooled`.

        `output` are output tokens of an earlier core. Without an `isolation_group`, a suspect runs alone. No two
        clients may use the same slot.
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
            client=client,
            slot=slot,
            request_id=str(slot),
            params=PoolingParams() if pooled else SamplingParams(max_tokens=max_tokens, seed=1, **params),
            tokens=tokens,
            num_prompt_tokens=num_prompt_tokens,
            max_total_tokens=num_prompt_tokens if pooled else min(self.max_model_len, num_prompt_tokens + max_tokens),
            hashes=[] if salt is None else [root_hash(salt, 0 if adapter is None else adapter.number)],
            reads_cache=reads_cache,
            order=self.scheduler.order_of(priority),
            num_bytes=REQUEST_BYTES,
            after_pause=after_pause,
            is_replay=is_replay,
            arrival_time=arrival_time,
            isolate_until_num_tokens=isolate_until_num_tokens,
            isolation_group=slot if isolation_group is None else isolation_group,
            adapter=adapter,
            owner=owner,
            tenant=tenant,
            max_drafts=self.max_drafts,
            images=images,
        )
        if not pooled:
            request.logits_processors = LogitsProcessors.from_params(request.sampling, [])
        self.scheduler.add(request)
        return request

    def step(self, token=7, failing=()):
        """Launch a step and process the pending steps that are due.

        Each row gets `token`, which may be a function of slot and position, or a vector; the slots `failing` get
        neither. Return the step launched, else the last step processed, else None.
        """
        step = self.scheduler.schedule()
        if step is not None:
            self.check_suspects(step)
            self.launch(step, token if callable(token) else lambda slot, position: token, failing)
        processed = self.process_all_but(self.ahead if step is not None else 0)
        self.pause.settle()
        check_invariants(self.scheduler)
        return processed if step is None else step

    def encode_slice(self, is_last=True):
        """Encode a slice of a tile, the last one or not; return the tile, or None if none is to be encoded."""
        assert not self.scheduler.pending_steps
        begun = self.scheduler.next_tile()
        if begun is not None:
            self.slices.append(begun.request.slot)
            if is_last:
                begun.image.note_encoded(begun.tile, torch.zeros(begun.image.shape.tile_tokens, 1))
                self.scheduler.waiting.note_encoded(begun)
        check_invariants(self.scheduler)
        return begun

    def launch(self, step, token, failing):
        assert self.memory.is_whole, "nothing is computed without weights and cache"
        self.compute(step)
        rows, num_tokens = step.choices(self.batch.num_computed_tokens[step.rows])
        positions = num_tokens - self.batch.num_prompt_tokens[rows]
        tokens = [
            NO_TOKEN if slot in failing else token(slot, position)
            for slot, position in zip(self.batch.slot[rows].tolist(), positions.tolist(), strict=True)
        ]
        self.latest = list(tokens)
        slots = self.batch.slot[step.rows[step.pools]].tolist()
        vectors = [np.full(2, np.nan if slot in failing else 1, np.float32) for slot in slots]
        self.num_launched += 1
        output = ReadyOutput(ModelOutput(np.array(tokens, np.int64), vectors=vectors))
        self.scheduler.launched(step, output, self.num_launched)
        if step.samples_after_update:
            self.process_all_but(1)
        is_awaited = np.zeros(len(self.batch.requests), np.bool_)
        for pending in list(self.scheduler.pending_steps)[:-1]:
            is_awaited[pending.step.rows[pending.step.samples & pending.live]] = True
        assert not (is_awaited & self.batch.reads_output)[rows].any(), "logits processors see the whole output"

    def process_all_but(self, count):
        """Process the pending steps except the last `count`; return the last step processed, or None."""
        processed = None
        while len(self.scheduler.pending_steps) > count:
            processed = self.scheduler.pending_steps.oldest
            update = self.scheduler.update(processed.output.wait())
            for slot, tok, position in zip(update.slots, update.tokens, update.positions, strict=True):
                output = self.outputs.setdefault(int(slot), [])
                assert position == len(output), "positions are consecutive"
                assert int(slot) not in self.ends, "no token follows the end"
                output.append(int(tok))
            assert not {(client, slot) for client, slot, _ in update.vectors} & update.gone
            self.queue_times |= {slot: seconds for _, slot, seconds in update.queued}
            self.end(update.finished)
        return processed and processed.step

    def check_suspects(self, step):
        """Check that suspects share the step with their group alone, and that isolated steps leave every second step.

        Two isolated steps follow each other only if no other request has a row.
        """
        requests = [self.batch.request(row) for row in step.rows.tolist()]
        groups = {request.isolation if request.isolate_until_num_tokens else None for request in requests}
        assert len(groups) == 1
        is_isolated = groups != {None}
        if is_isolated and self.latest_is_isolated:
            assert self.batch.is_isolated[self.batch.order].all(), "the other requests have their turn"
        self.latest_is_isolated = is_isolated

    def end(self, ends):
        for _, end in ends:
            assert end.num_output_tokens == len(self.outputs.get(end.slot, []))
            assert end.slot not in self.ends, "a request ends once"
            self.ends[end.slot] = end.reason
            self.stop_reasons[end.slot] = end.stop_reason

    def compute(self, step):
        """Write the blocks of `step` as each layer of a model does, then check that its rows read their own tokens.

        A layer writes for all rows before it reads for any row.
        """
        rows = []
        for place, (row, count) in enumerate(zip(step.rows.tolist(), step.counts.tolist(), strict=True)):
            tokens, done = self.batch.token_ids[row].tolist(), int(self.batch.num_computed_tokens[row])
            if place in step.awaits:
                assert (place < step.num_decodes, count) == (True, 1)
                (index,) = step.awaited[step.awaits == place].tolist()
                tokens[done] = self.latest[index]
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
        """Pause, and clear the model's cache if the pause forbids its use; return the future of the pause."""
        self.process_all_but(0)
        done = self.pause.pause(mode, clears_cache)
        if clears_cache:
            done.add_done_callback(lambda done: done.exception() or self.contents.clear())
        return done

    def settle_sleep(self):
        """Carry out the calls of `sleep` that are due."""
        self.process_all_but(0)
        self.sleep.settle()
        check_invariants(self.scheduler)

    def run(self, token=7):
        for _ in range(10_000):
            if self.step(token) is None:
                return
        raise AssertionError("the scheduler still has work after 10,000 steps")
