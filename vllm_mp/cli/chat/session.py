"""A chat with a model: the conversation, and the answers to it."""

from typing import TYPE_CHECKING

from vllm_mp.cli.chat.answer import Answer
from vllm_mp.cli.chat.context_room import fitting_prompt
from vllm_mp.cli.chat.conversation import Conversation
from vllm_mp.cli.chat.prompt_line import PromptLine
from vllm_mp.cli.terminal.screen import Screen
from vllm_mp.errors import EngineError, EngineGenerateError
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    import asyncio

    from vllm_mp.client.async_llm import AsyncLLM


class ChatSession:
    """A conversation with a model on a screen."""

    def __init__(
        self,
        runner: "asyncio.Runner",
        llm: "AsyncLLM",
        conversation: Conversation,
        screen: Screen,
        lora: LoRARequest | None = None,
        is_verbose: bool = False,
    ) -> None:
        self._runner = runner
        self._lora = lora
        self.llm = llm
        self.conversation = conversation
        self.screen = screen
        self.is_verbose = is_verbose
        """Each answer is followed by its speed."""

    def ask(self, text: str, prompt_line: PromptLine) -> None:
        """Add the message `text` to the conversation, and answer it.

        A message that is refused, or whose answer fails, is taken back. Raises EngineError if the engine has failed.
        """
        self.conversation.messages.append({"role": "user", "content": text})
        self._answer(prompt_line)

    def retry(self, prompt_line: PromptLine) -> None:
        """Answer the last message again. Raises ValueError if there is none."""
        messages = self.conversation.messages
        if not messages:
            raise ValueError("there is no message to answer again; write one first")
        if messages[-1]["role"] == "assistant":
            messages.pop()
        self._answer(prompt_line)

    def _answer(self, prompt_line: PromptLine) -> None:
        answer, messages = Answer(self.screen), self.conversation.messages
        try:
            params = SamplingParams(**self.conversation.parameters, output_kind=RequestOutputKind.DELTA)
            prompt = fitting_prompt(self.llm, self.conversation, self.screen)
            with prompt_line.while_busy():
                self._runner.run(answer.stream(self.llm, prompt, params, self._lora))
        except KeyboardInterrupt:
            self.screen.mark("[stopped]")
        except (ValueError, EngineError) as error:
            if answer.text:
                self.screen.write("\n")  # shows the last word, too
            if not isinstance(error, ValueError | EngineGenerateError):
                raise
            messages.pop()
            self.screen.complain(str(error))
            return
        # What was written before the answer was stopped belongs to the conversation.
        messages.append({"role": "assistant", "content": answer.text})
        self.screen.write("\n")
        if answer.notice:
            self.screen.note(f"({answer.notice})")
        if self.is_verbose:
            self.screen.note(answer.summary())
        if self.screen.is_terminal:
            self.screen.write("\n")  # an empty line between the turns
