"""What all requests to a server share."""

import time
from dataclasses import dataclass, field

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.server.admission import Admission
from vllm_mp.server.chat_template import ChatTemplate
from vllm_mp.server.live_feed import LiveFeed
from vllm_mp.server.options import ServerOptions
from vllm_mp.server.shared_state import SharedState


@dataclass
class ServerState:
    """The engine, the options, and the parts of the server that outlive a request."""

    engine: AsyncLLM
    options: ServerOptions
    admission: Admission
    shared: SharedState | None = None
    """What this process shares with other front processes; None: it is the only one."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When the server started, in seconds since 1970: the `created` of its models."""
    chat_template: ChatTemplate = field(init=False)
    """The model's chat template."""
    live_feed: LiveFeed = field(init=False)
    """What the page at `/` shows."""

    def __post_init__(self) -> None:
        has_tokenizer = not self.engine.model_config.skip_tokenizer_init
        self.chat_template = ChatTemplate(self.engine.get_tokenizer() if has_tokenizer else None)
        self.live_feed = LiveFeed(self.engine, self.admission)
