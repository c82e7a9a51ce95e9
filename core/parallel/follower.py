"""What a rank other than rank 0 does with the messages of its core."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from vllm_mp.config import VllmConfig
from vllm_mp.core.lora.adapter import Adapter
from vllm_mp.core.parallel.messages import MAX_REPLY_BYTES, Call, Reply
from vllm_mp.core.worker.leader import AdapterTable, Kind
from vllm_mp.core.worker.model_runner import ModelRunner
from vllm_mp.core.worker.profiler import Profiler
from vllm_mp.core.worker.step_message import MessageError, RowMirror, decode_step
from vllm_mp.core.worker.worker import Worker
from vllm_mp.kernels.ops import Factors

_MAX_ERROR: int = MAX_REPLY_BYTES // 8


class Follower:
    """Computes the share of one rank of each step, and carries out calls."""

    def __init__(
        self, config: VllmConfig, rank: int, device: torch.device, runner: ModelRunner, reply: Callable[[Reply], None]
    ) -> None:
        """`reply` sends the result of a call to the core."""
        self._runner = runner
        self._reply = reply
        self._profiler = Profiler(device)
        scheduler, model, cache = config.scheduler_config, config.model_config, config.cache_config
        has_rope_positions = model.architecture.has_rope_positions
        self._rows = RowMirror(scheduler.max_num_seqs, model.max_model_len, cache.block_size, has_rope_positions)
        self._hidden = torch.empty(0)
        """Hidden states of the latest step; in a pipeline, those from the last stage."""
        self._has_head = config.parallel_config.tensor_parallel_size > rank
        memory = runner.memory
        self._methods: dict[str, Callable[..., Any]] = {
            "offload_weights": memory.offload_weights,
            "drop_weights": memory.drop_weights,
            "restore_weights": memory.restore_weights,
            "drop_cache": memory.drop_cache,
            "restore_cache": memory.restore_cache,
            "prepare": memory.prepare,
            "start_profile": self._profiler.start,
            "stop_profile": self._profiler.stop,
            "discard_profile": self._profiler.discard,
            "collective_rpc": Worker(config, device, runner).call,
            "load_adapter": self._load_adapter,
        }

    def handle(self, message: memoryview) -> None:
        """Carry out one message of the ring. Raises MessageError for an unknown message, and any error of a step."""
        kind, data = int.from_bytes(message[:8], "little"), message[8:]
        if kind == Kind.STEP:
            self._hidden = self._runner.follow(decode_step(data, self._rows), self._rows)
            self._profiler.count_step()
        elif kind in (Kind.TAKE, Kind.LOGITS) and not self._has_head:
            return
        elif kind == Kind.TAKE:
            self._hidden = self._runner.follow_take(np.frombuffer(data, np.int64).copy())
        elif kind == Kind.LOGITS:
            sampling, *indices = np.frombuffer(data, np.int64).tolist()
            self._runner.follow_logits(self._hidden, sampling, np.array(indices, np.int64))
        elif kind == Kind.CALL:
            self._call(msgspec.msgpack.decode(data, type=Call))
        else:
            raise MessageError(f"the core sends a message of the unknown kind {kind}")

    def _call(self, call: Call) -> None:
        method = self._methods.get(call.method)
        if method is None:
            raise MessageError(f"the core calls {call.method!r:.100}, which no rank has")
        if method == self._load_adapter:
            # Rank 0 takes part in the broadcasts; an error would leave it waiting, so it ends this rank.
            self._load_adapter(*call.arguments)
            return
        try:
            reply = Reply(number=call.number, result=method(*call.arguments))
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            reply = Reply(number=call.number, error=f"{type(error).__name__}: {error}"[:_MAX_ERROR])
        self._reply(reply)

    def _load_adapter(self, slot: int, fields: dict[str, Any]) -> None:
        """Take part in the broadcast of an adapter, and put it into `slot`."""
        table = msgspec.convert(fields, AdapterTable)
        dtype: torch.dtype = getattr(torch, table.dtype)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype)

        factors = {
            part: Factors(empty(*shape[:2]), empty(*shape[2:]))
            for part, shape in zip(table.parts, table.shapes, strict=True)
        }
        num_bytes = sum(factor.nbytes for of_part in factors.values() for factor in of_part)
        self._runner.load_adapter(slot, Adapter(factors, num_bytes))
