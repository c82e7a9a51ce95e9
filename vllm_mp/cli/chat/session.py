"""A chat with a model: the conversation, and the answers to it."""

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mp.arguments.counted import counted
from vllm_mp.cli.chat.answer import Answer
from vllm_mp.cli.chat.context_room import fitting_prompt
from vllm_mp.cli.chat.conversation import Conversation
from vllm_mp.cli.chat.images import content_with_images, data_url, num_image_tokens, num_images, read_image_file
from vllm_mp.cli.chat.prompt_line import PromptLine
from vllm_mp.cli.chat_text import chat_prompt, prompt_tokens
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
        self.images: list[str] = []
        """The images that go with the next message, as data URLs."""

    def ask(self, text: str, prompt_line: PromptLine) -> None:
        """Add the message `text`, with the images that wait for it, to the conversation, and answer it.

        A message that is refused, or whose answer fails, is taken back, and its images wait again. Raises EngineError
        if the engine has failed.
        """
        images, self.images = self.images, []
        self.conversation.messages.append({"role": "user", "content": content_with_images(text, images)})
        if not self._answer(prompt_line) and images:
            self.images = images
            self.screen.note(f"({counted(len(images), 'image')} of the next message; /image without FILE drops them)")

    def add_image(self, path: Path, prompt_line: PromptLine) -> int:
        """Let the image in a file go with the next message, and return how many tokens it takes.

        Raises ValueError, with the remedy, if the file has no image, or the model takes no such image, or no more.
        """
        limit = self.llm.vllm_config.multimodal_config.max_images
        present = num_images(self.conversation.messages) + len(self.images)
        if self.llm.model_config.images is not None and present >= limit:
            raise ValueError(
                f"a conversation may have at most {limit} images (limit_mm_per_prompt), and this one has {present}; "
                "/clear begins a new one"
            )
        content = read_image_file(path)
        with prompt_line.while_busy():
            num_tokens = self._runner.run(num_image_tokens(self.llm, path, content))
        self.images.append(data_url(path, content))
        return num_tokens

    def num_tokens(self) -> int:
        """Return how many tokens the conversation has. Raises ValueError if it is no prompt."""
        messages = self.conversation.to_send()
        if not self.conversation.messages:
            return 0
        return len(self._runner.run(prompt_tokens(self.llm, chat_prompt(self.llm, messages))))

    def retry(self, prompt_line: PromptLine) -> None:
        """Answer the last message again. Raises ValueError if there is none."""
        messages = self.conversation.messages
        if not messages:
            raise ValueError("there is no message to answer again; write one first")
        if messages[-1]["role"] == "assistant":
            messages.pop()
        self._answer(prompt_line)

    def _answer(self, prompt_line: PromptLine) -> bool:
        """Answer the last message, and return whether the message stays in the conversation."""
        answer, messages = Answer(self.screen), self.conversation.messages
        try:
            params = SamplingParams(**self.conversation.parameters, output_kind=RequestOutputKind.DELTA)
            prompt = fitting_prompt(self.llm, self.conversation, self.screen, self._runner)
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
            return False
        # What was written before the answer was stopped belongs to the conversation.
        messages.append({"role": "assistant", "content": answer.text})
        self.screen.write("\n")
        if answer.notice:
            self.screen.note(f"({answer.notice})")
        if self.is_verbose:
            self.screen.note(answer.summary())
        if self.screen.is_terminal:
            self.screen.write("\n")  # an empty line between the turns
        return True
