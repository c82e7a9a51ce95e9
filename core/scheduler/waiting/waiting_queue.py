"""The requests that wait for a row of the batch."""

import time

from vllm_mp.core.scheduler.request import Request, RequestKey
from vllm_mp.core.scheduler.waiting.adapter_turns import AdapterTurns
from vllm_mp.core.scheduler.waiting.fair_turns import FairTurns
from vllm_mp.core.scheduler.waiting.image_turns import BegunTile, ImageTurns
from vllm_mp.core.scheduler.waiting.isolated_groups import IsolatedGroups


class WaitingQueue:
    """The requests that wait for their turn, and those that arrived during a pause and are held back.

    Held requests are not in the queue: `first` finds none of them before `release`. Nor does it find suspects, which
    wait in `isolated`, and parked requests: requests whose adapter has no slot, in `adapters`, and requests whose
    constraint is being compiled. Requests whose images are being encoded wait in `images`, suspects there too.
    """

    def __init__(self, adapters: AdapterTurns | None = None) -> None:
        """Without `adapters` no request may have an adapter."""
        self.adapters = adapters
        self.turns = FairTurns() if adapters is None else adapters.turns
        self.isolated = IsolatedGroups()
        self.images = ImageTurns()
        self._held: dict[RequestKey, Request] = {}
        self._uncompiled: dict[RequestKey, Request] = {}
        """Requests whose constraint is being compiled."""
        self.is_holding = False
        """True: requests that arrive are held back."""

    def __len__(self) -> int:
        """Return the number of waiting requests, suspects included, without held and parked requests.

        Those whose images are being encoded are not counted, except for suspects.
        """
        return len(self.turns) + len(self.isolated)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_parked(self) -> int:
        """Number of requests whose adapter has no slot, or whose constraint is being compiled."""
        return len(self._uncompiled) + (0 if self.adapters is None else self.adapters.num_parked)

    @property
    def num_without_embeddings(self) -> int:
        """Number of requests whose images are being encoded, without suspects."""
        return len(self.images) - self.images.num_suspects

    def add(self, request: Request, may_hold: bool = True) -> None:
        """Queue a request, or hold it back if it arrives during a pause and `may_hold` is true."""
        if not request.queued_at:
            request.queued_at = time.monotonic()
        if may_hold and self.is_holding:
            self._held[request.key] = request
            return
        if request.constrained is not None and not request.constrained.is_compiled:
            self._uncompiled[request.key] = request
        elif request.isolate_until_num_tokens:
            self.isolated.add(request)
        elif request.adapter is None or self._adapters.place(request.adapter, request):
            self.turns.add(request)

    def first(self) -> Request | None:
        """Return the next request that is not a suspect, which stays in the queue; None if there is none."""
        return self.turns.first()

    def pop(self, request: Request, num_tokens: int) -> None:
        """Remove the request that `first`, of the queue or of `isolated`, has just returned.

        `num_tokens` tokens of it are not cached.
        """
        if request.isolate_until_num_tokens:
            self.isolated.remove(request)
            self.turns.count(request, num_tokens)
        else:
            self.turns.take_turn(request, num_tokens)
        if request.adapter is not None:
            self._adapters.note_admission(request.adapter, request)
        if request.queue_seconds is None:
            request.queue_seconds = time.monotonic() - request.queued_at

    def await_images(self, request: Request, first_token: int) -> bool:
        """Return whether a request that waits needs images from `first_token` on that are not encoded.

        If so, it waits in `images`; of the two queues, only suspects stay in theirs.
        """
        if request in self.images:
            return True
        images = request.images
        if images is None or images.missing_tile(first_token, request.num_prompt_tokens) is None:
            return False
        if not request.isolate_until_num_tokens:
            self.remove(request)
        self.images.add(request, first_token)
        return True

    def note_encoded(self, tile: BegunTile) -> None:
        """Queue the requests again that need no tile any more besides `tile`, which was encoded."""
        for request in self.images.note_encoded(tile):
            if not request.isolate_until_num_tokens:
                self.add(request, may_hold=False)

    def remove(self, request: Request) -> None:
        """Remove a request that is queued, parked or held back, or waits for its images."""
        if request in self.images:
            self.images.remove(request)
            if not request.isolate_until_num_tokens:
                return
        if self._held.pop(request.key, None) is not None or self._uncompiled.pop(request.key, None) is not None:
            return
        if request.isolate_until_num_tokens:
            self.isolated.remove(request)
        elif request.adapter is None or not self._adapters.remove(request.adapter, request):
            self.turns.remove(request)

    def note_compiled(self, request: Request) -> None:
        """Queue a request whose constraint was being compiled, unless it is held back."""
        if self._uncompiled.pop(request.key, None) is not None:
            self.add(request, may_hold=False)

    def forget_client(self, client: int) -> None:
        """Forget the turns of a client that has left and has no request."""
        self.turns.forget(client)
        self.images.forget(client)
        if self.adapters is not None:
            self.adapters.forget_client(client)

    @property
    def _adapters(self) -> AdapterTurns:
        assert self.adapters is not None, "a request has an adapter only if adapters are enabled"
        return self.adapters

    def hold(self) -> None:
        """Hold back requests that arrive from now on."""
        self.is_holding = True

    def release(self) -> None:
        """Queue all held requests, and from now on requests that arrive."""
        self.is_holding = False
        for request in self._held.values():
            self.add(request)
        self._held.clear()
