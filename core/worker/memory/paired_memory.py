"""The memory of a model and of its draft model, which sleep and wake up together."""

from collections.abc import Callable

from vllm_mp.core.worker.memory.sleep import Memory, MemoryLostError


class PairedMemory:
    """It is a `vllm_mp.core.worker.memory.sleep.Memory`."""

    def __init__(self, target: Memory, draft: Memory, forget: Callable[[], None]) -> None:
        """`forget` is called when the KV cache of the draft model is gone."""
        self._target = target
        self._draft = draft
        self._forget = forget

    def offload_weights(self) -> None:
        self._target.offload_weights()
        try:
            self._draft.offload_weights()
        except RuntimeError as refusal:
            why = str(refusal)
        else:
            return
        # Outside of `except`, because the error's frames refer to memory that the restore may need.
        try:
            self._target.restore_weights()
        except RuntimeError as error:
            raise MemoryLostError(
                f"the draft model's weights cannot move to host memory ({why}), and the model's cannot be restored: "
                f"{error}"
            ) from error
        raise RuntimeError(why)

    def drop_weights(self) -> None:
        self._target.drop_weights()
        self._draft.drop_weights()

    def restore_weights(self) -> None:
        self._target.restore_weights()
        self._draft.restore_weights()

    def drop_cache(self) -> None:
        self._target.drop_cache()
        self._draft.drop_cache()
        self._forget()

    def restore_cache(self) -> None:
        self._target.restore_cache()
        self._draft.restore_cache()

    def prepare(self) -> None:
        self._target.prepare()
