"""The parsers that the server's options name."""

from vllm_mp.client.answers.parser_registry import load_parser_plugin
from vllm_mp.client.reasoning import REASONING_PARSERS
from vllm_mp.client.tool_parsers import TOOL_PARSERS
from vllm_mp.server.http.options import ServerOptions


def load_parsers(options: ServerOptions) -> None:
    """Load the plugin, and check the names of the parsers. Raises ValueError, naming the option, for a wrong value."""
    if options.tool_parser_plugin is not None:
        try:
            load_parser_plugin(options.tool_parser_plugin)
        except ValueError as error:
            raise ValueError(f"tool_parser_plugin: {error}") from error
    known = {
        "tool_call_parser": ["auto", *TOOL_PARSERS.names()],
        "reasoning_parser": ["auto", "none", *REASONING_PARSERS.names()],
    }
    for option, names in known.items():
        value = getattr(options, option)
        if value not in names:
            raise ValueError(f"{option} must be one of {', '.join(names)}, got {value!r}")
