"""A model with its weights, which a template process may hold too."""

import logging
import os
import signal

from vllm_mp.core.images.encoder import ImageEncoder
from vllm_mp.core.models import CausalLM
from vllm_mp.wire import ModelDigest

logger = logging.getLogger(__name__)


class LoadedModel:
    """A model that was loaded before the core had threads, so that a template process shares its memory."""

    def __init__(self, identity: bytes, model: CausalLM, digest: ModelDigest) -> None:
        """`identity` is equal for all configurations that load the same models in the same form."""
        self.identity = identity
        self.model: CausalLM | None = model
        """None after `forget`."""
        self.digest = digest
        self.draft: LoadedModel | None = None
        """The model that drafts tokens for it; None if there is none."""
        self.encoder: ImageEncoder | None = None
        """What makes embeddings of images for it; None if it takes none."""
        self._template: int | None = None
        """Descriptor of the template process that shares the memory; None: there is none."""

    def share_with(self, template_pid: int) -> None:
        """Note that the process `template_pid`, which lives, holds this model too."""
        try:
            self._template = os.pidfd_open(template_pid)
        except OSError as error:
            logger.warning("the template process %d will keep the weights in a sleep: %s", template_pid, error)

    def forget(self) -> None:
        """Give the model up, and end the template process, so that the memory is free once nobody refers to it."""
        self.model = None
        if self._template is not None:
            try:
                signal.pidfd_send_signal(self._template, signal.SIGTERM)
            except ProcessLookupError:
                pass  # it has ended by itself
            finally:
                os.close(self._template)
                self._template = None
