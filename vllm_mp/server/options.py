"""The options of the HTTP server; each is also a flag of `vllm-mp serve`."""

from dataclasses import dataclass

from vllm_mp.options import Options, option


@dataclass(kw_only=True)
class ServerOptions(Options):
    """How the server listens, whom it serves, and its limits.

    Construction raises TypeError or ValueError, naming the option, for a value that is not allowed.
    """

    CLI_GROUP = "server options"

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0: every address of the machine", subject="server")
    port: int = option(
        8000, "Port to listen on; 0: a free port that the system chooses", low=0, high=65_535, subject="server"
    )
    connect: str | None = option(
        None,
        "Address of a running core to serve, as given to `vllm-mp engine --listen`; by default a core is started. With "
        "this option, the engine options of that core apply",
        subject="server",
    )
    key_file: str | None = option(
        None, "Key file of this client, as `vllm-mp keys client` makes it; required if connect names a tcp:// address"
    )
    core_owner: str | None = option(
        None, "User beside this one and root who may own the Unix socket that connect names; by default no other user"
    )
    api_server_count: int = option(
        1, "Number of server processes that share the port and the core", low=1, high=256, subject="server"
    )
    api_key: tuple[str, ...] = option(
        (),
        "Key that requests must carry as `Authorization: Bearer KEY`; give it several times for several keys. Keys are "
        "also read from VLLM_API_KEY and VLLM_MP_API_KEY; by default no key is needed",
        subject="server",
    )
    api_key_file: str | None = option(None, "File of further keys, one in each line")
    ssl_certfile: str | None = option(None, "Certificate chain in PEM format; with it the server speaks HTTPS only")
    ssl_keyfile: str | None = option(
        None, "Private key of the certificate in PEM format; by default it is read from ssl_certfile"
    )
    ssl_ca_certs: str | None = option(
        None, "Authorities in PEM format; with it clients must present a certificate that one of them has signed"
    )
    cors_allow_origin: tuple[str, ...] = option(
        (), "Origin whose web pages may call the server; give it several times for several; *: every origin"
    )
    access_log: bool = option(False, "Write a line to the log for each request: method, path, status and duration")
    max_waiting_requests: int = option(
        4096,
        "Maximum number of requests beyond the max_num_seqs that can run at once; further requests get status 429",
        low=0,
    )
    request_timeout: float | None = option(
        None, "Seconds within which the response to a request must be complete; by default no limit", low=0.001
    )
    drain_timeout: float = option(
        30.0, "Seconds that live requests get to end after SIGTERM or Ctrl-C; then they end with an error", low=0.0
    )
    ready_timeout: float = option(
        2.0, "Seconds within which the core must answer /ready; then /core_status answers without it", low=0.01
    )
    trust_request_chat_template: bool = option(
        False, "Run the chat templates that requests bring; by default such a request is refused"
    )
    allow_runtime_lora_updating: bool = option(
        False,
        "Let requests load and unload LoRA adapters, from any folder of the core's machine "
        "(/v1/load_lora_adapter); VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 does the same",
    )
    max_body_bytes: int = option(
        32 * 2**20, "Maximum size of a request's body in bytes; a larger body gets status 413", low=1
    )
    max_header_bytes: int = option(
        32 * 2**10, "Maximum size of a request's line and headers in bytes; larger ones get status 431", low=256
    )
    max_connections: int = option(
        16_384,
        "Maximum number of connections, less if the process may open fewer files; further connections get status 503",
        low=1,
    )
    header_timeout: float = option(
        20.0, "Seconds within which a client must send the line and headers of a request", low=0.01
    )
    body_timeout: float = option(60.0, "Seconds within which a client must send the body of a request", low=0.01)
    keep_alive_timeout: float = option(75.0, "Seconds after which a connection without a request is closed", low=0.01)

    def max_live_requests(self, max_num_seqs: int) -> int:
        """Return the number of requests that may be live at a time, with a core that runs up to `max_num_seqs`."""
        return max_num_seqs + self.max_waiting_requests
