"""The options of the HTTP server; each is also a flag of `vllm-mp serve`."""

from dataclasses import dataclass
from typing import Any

from vllm_mp.arguments.options import Options, option


@dataclass(kw_only=True)
class ServerOptions(Options):
    """How the server listens, whom it serves, and its limits.

    Construction raises TypeError or ValueError, naming the option, for a value that is not allowed.
    """

    CLI_GROUP = "server options"

    host: str = option("127.0.0.1", "Listen on this address; 0.0.0.0: every address of the machine.", subject="server")
    port: int = option(
        8000, "Listen on this port; 0: a free port that the system chooses.", low=0, high=65_535, subject="server"
    )
    uds: str | None = option(
        None,
        "Listen on a Unix socket at this path instead of host and port; a socket file that no process listens on is "
        "replaced. Default: none.",
    )
    metrics_port: int | None = option(
        None,
        "Answer /metrics, /health and /ready also on this port of the host, without a key and without TLS, for "
        "scrapers and probes that have neither; 0: a free port. Default: only on the port of the server.",
        low=0,
        high=65_535,
    )
    connect: str | None = option(
        None,
        "Serve the running core at this address, as given to `vllm-mp engine --listen`, or several cores of one model "
        "at addresses separated by commas; the engine options of the cores apply. Default: a core is started.",
        subject="server",
    )
    key_file: str | None = option(
        None,
        "Read the client's key from this file, as `vllm-mp keys client` makes it; required if connect names a tcp:// "
        "address; or from several files separated by commas, one for each address. Default: none.",
    )
    core_owner: str | None = option(
        None,
        "Let this user, beside the current user and root, own the Unix socket that connect names. Default: no other "
        "user.",
    )
    api_server_count: int = option(
        1, "Share the port and the core among N server processes.", low=1, high=256, subject="server"
    )
    api_key: tuple[str, ...] = option(
        (),
        "Require this key of requests, as `Authorization: Bearer KEY`; the option may be repeated. Keys are also read "
        "from VLLM_API_KEY and VLLM_MP_API_KEY. Default: no key is needed.",
        subject="server",
    )
    api_key_file: str | None = option(None, "Read further keys from this file, one in each line. Default: none.")
    operator_key: tuple[str, ...] = option(
        (),
        "Let requests with this key, as `Authorization: Bearer KEY`, make the calls for operators, such as /sleep; the "
        "option may be repeated. A key is also read from VLLM_MP_OPERATOR_KEY. Default: those calls are refused.",
    )
    operator_key_file: str | None = option(
        None, "Read further keys of operators from this file, one in each line. Default: none."
    )
    shared_prefix_cache: bool = option(
        False,
        "Let requests with different API keys share cached prefixes, which is faster if their prompts begin alike. "
        "Default: they share none, so that no holder of a key can find out what another one has asked.",
        subject="server",
    )
    ssl_certfile: str | None = option(
        None, "Speak HTTPS only, with this certificate chain in PEM format. Default: HTTP."
    )
    ssl_keyfile: str | None = option(
        None, "Read the certificate's private key from this PEM file. Default: ssl_certfile."
    )
    ssl_ca_certs: str | None = option(
        None,
        "Require of clients a certificate that an authority in this PEM file has signed. Default: none is required.",
    )
    cors_allow_origin: tuple[str, ...] = option(
        (), "Let web pages of this origin call the server; *: every origin. The option may be repeated. Default: none."
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "While no key is required, serve requests whose Host header has this name, beside localhost and the address of "
        "--host; *: any name. The option may be repeated. Default: none.",
    )
    root_path: str = option(
        "", "Serve the endpoints also below this path, for a proxy that does not remove it. Default: none."
    )
    access_log: bool = option(False, "Write a line to the log for each request: method, path, status and duration.")
    max_waiting_requests: int = option(
        4096,
        "Let at most N requests wait beyond the max_num_seqs that run at once; further requests get status 429.",
        low=0,
    )
    request_timeout: float | None = option(
        None, "End a request whose response is not complete after this many seconds. Default: no limit.", low=0.001
    )
    drain_timeout: float = option(
        30.0,
        "Give live requests this many seconds to end after SIGTERM or Ctrl-C; then they end with an error.",
        low=0.0,
    )
    ready_timeout: float = option(
        2.0, "Give the core this many seconds to answer /ready; /core_status then answers without the core.", low=0.01
    )
    strict_requests: bool = option(
        False,
        "Refuse requests with fields that the server does not know. Default: such fields are ignored, and the log "
        "names each of them once; a request with the header `Prefer: handling=strict` is refused.",
    )
    trust_request_chat_template: bool = option(
        False, "Run the chat templates that requests bring; such requests are refused otherwise."
    )
    response_role: str = option(
        "assistant",
        "Give answers of /v1/chat/completions this role; one that continues the last message has the role of that.",
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None,
        "Give these variables to the chat template, as JSON; chat_template_kwargs of a request replace those of the "
        "same name. Default: none.",
    )
    tool_call_parser: str = option(
        "auto",
        "Find the calls of tools in answers with this parser; auto: the parser that fits the model's chat template.",
        subject="server",
    )
    tool_fallback: bool = option(
        True,
        "Describe tools in a built-in prompt if the model's chat template knows none; such requests are refused "
        "otherwise.",
    )
    tool_parser_plugin: str | None = option(
        None, "Run this Python file, which registers parsers of tool calls and reasoning. Default: none."
    )
    reasoning_parser: str = option(
        "auto",
        "Split the thoughts of a model from its answers with this parser; auto: the parser that fits the model's chat "
        "template, if one does; none: answers are left whole.",
    )
    enable_auto_tool_choice: bool = option(
        False, "Accepted for callers of vLLM, without effect: a model may always choose whether it calls a tool."
    )
    allow_runtime_lora_updating: bool = option(
        False,
        "Let requests load and unload LoRA adapters, from any folder of the core's machine "
        "(/v1/load_lora_adapter); VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 does the same.",
    )
    max_body_bytes: int = option(
        32 * 2**20, "Accept a request's body of at most N bytes; a larger body gets status 413.", low=1
    )
    max_header_bytes: int = option(
        32 * 2**10, "Accept at most N bytes of a request's line and headers; larger headers get status 431.", low=256
    )
    max_connections: int = option(
        16_384,
        "Keep at most N connections, fewer if the process may open fewer files; further connections get status 503.",
        low=1,
    )
    header_timeout: float = option(
        20.0, "Give a client this many seconds to send the line and headers of a request.", low=0.01
    )
    body_timeout: float = option(60.0, "Give a client this many seconds to send the body of a request.", low=0.01)
    keep_alive_timeout: float = option(75.0, "Close a connection that has no request for this many seconds.", low=0.01)

    def max_live_requests(self, max_num_seqs: int) -> int:
        """Return the number of requests that may be live at a time, with a core that runs up to `max_num_seqs`."""
        return max_num_seqs + self.max_waiting_requests
