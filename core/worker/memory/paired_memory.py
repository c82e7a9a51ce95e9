"""The memory of a model and of another that works for it, which sleep and wake up together."""

from collections.abc import Callable

from vllm_mp.core.worker.memory.sleep import Memory, MemoryLostError


class PairedMemory:
    """It is a `vllm_mp.core.worker.memory.sleep.Memory`."""

    def __init__(self, target: Memory, other: Memory, name: str, forget: Callable[[], None] = lambda: None) -> None:
        """`name` says in errors what `other` is. `forget` is called when the KV cache of `other` is gone."""
        self._target = target
        self._other = other
        self._name = name
        self._forget = forget

    def offload_weights(self) -> None:
        self._target.offload_weights()
        try:
            self._other.offload_weights()
        except RuntimeError as refusal:
            why = str(refusal)
        else:
            return
        # Outside of `except`, because the error's frames refer to memory that the restore may need.
        try:
            self._target.restore_weights()
        except RuntimeError as error:
            raise MemoryLostError(
                f"the weights of the {self._name} cannot move to host memory ({why}), and those of the model cannot be "
                f"restored: {error}"
            ) from error
        raise RuntimeError(why)

    def drop_weights(self) -> None:
        self._target.drop_weights()
        self._other.drop_weights()

    def restore_weights(self) -> None:
        self._target.restore_weights()
        self._other.restore_weights()

    def drop_cache(self) -> None:
        self._target.drop_cache()
        self._other.drop_cache()
        self._forget()

    def restore_cache(self) -> None:
        self._target.restore_cache()
        self._other.restore_cache()

    def prepare(self) -> None:
        self._target.prepare()
