"""The settings of the HTTP face: where it listens, whom it answers, and how much it takes."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from tokenspeed.options import ConfigError, Settings, option

MAX_JSON_DEPTH = 512
"""Python's own limit is a thousand calls, and some levels take more than one."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Settings):
    """The HTTP face."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on", low=0, high=65535)
    api_processes: int = option(
        1,
        "HTTP processes that share the port and the engine: more where one does not keep up",
        low=1,
        high=64,
    )
    api_key: tuple[str, ...] = option(
        (), "key(s) that clients must send as Bearer token", secret=True
    )
    api_key_file: str | None = option(
        None,
        "file with more keys, one a line; read again when it changes, and on SIGHUP; after a key, "
        "max_requests=N: no more of its requests are served at once",
    )
    admin_api_key: tuple[str, ...] = option(
        (),
        "key(s) of whoever runs the server: the routes that flush, abort, pause and profile take "
        "no others then, and these open nothing else (default: any API key opens them)",
        secret=True,
    )
    ssl_certfile: str | None = option(
        None, "PEM file with the certificate (and those above it): HTTPS; read again on SIGHUP"
    )
    ssl_keyfile: str | None = option(
        None, "PEM file with its private key (default: in --ssl-certfile)"
    )
    ssl_keyfile_password: str | None = option(
        None, "what the private key is encrypted with", secret=True
    )
    ssl_ca_certs: str | None = option(
        None, "PEM file with the authorities whose clients may connect"
    )
    ssl_cert_reqs: int | None = option(
        None,
        "certificates of clients: 0 none is asked for, 1 one that is sent must be valid, 2 each "
        "client needs one (default: 2 with --ssl-ca-certs)",
        choices=(0, 1, 2),
    )
    allowed_origins: tuple[str, ...] = option(
        (), "web pages whose scripts may call the API, as https://page.example, or * for all (CORS)"
    )
    allowed_methods: tuple[str, ...] = option((), "HTTP methods that they may use (default: all)")
    allowed_headers: tuple[str, ...] = option((), "headers that they may send (default: all)")
    allow_credentials: bool = option(False, "let them send cookies")
    drain_timeout: float = option(
        30.0,
        "seconds that running requests get after SIGTERM",
        aliases=("--shutdown-timeout",),
        low=0.0,
        high=86400.0,
    )
    engine_startup_timeout: float = option(
        1800.0, "seconds until a start-up counts as failed", low=1.0, high=86400.0
    )
    engine_restarts: int = option(
        0,
        "how many times in any hour an engine that dies after it has served is started again; "
        "requests in it end with an error, new ones get 503 meanwhile; beyond that the server ends",
        low=0,
        high=1000,
    )
    served_model_name: tuple[str, ...] = option(
        (), "name(s) shown by the API (default: the model's)"
    )
    max_queued_requests: int = option(
        4096, "waiting requests before new ones get 429", low=1, high=1 << 20
    )
    max_queued_tokens: int = option(
        4 << 20,
        "prompt tokens of all requests that run or wait before new ones get 429; each of the n "
        "samples of a prompt counts, and of parameters beyond 4 KiB each four bytes",
        low=1,
        high=1 << 32,
        suffixes=True,
    )
    max_request_bytes: int = option(
        32 << 20, "largest request body in bytes", low=1024, high=1 << 32, suffixes=True
    )
    max_header_bytes: int = option(
        64 << 10,
        "largest request head in bytes: path and headers",
        low=1024,
        high=1 << 20,
        suffixes=True,
    )
    max_json_depth: int = option(
        128, "deepest nesting of a request's JSON", low=8, high=MAX_JSON_DEPTH
    )
    max_messages: int = option(4096, "most messages of a chat", low=1, high=1 << 20)
    max_tools: int = option(512, "most tools of a request", low=1, high=1 << 16)
    max_prompts: int = option(2048, "most prompts of a completion", low=1, high=1 << 16)
    max_sequences: int = option(
        2048, "most outputs of a request: prompts times n", low=1, high=1 << 16
    )
    body_timeout: float = option(
        60.0, "seconds in which a request's body must be there", low=0.1, high=86400.0
    )
    prompt_timeout: float = option(
        20.0,
        "seconds in which chat template and tokenizer must turn a prompt into tokens",
        low=0.01,
        high=3600.0,
    )
    request_timeout: float | None = option(
        None,
        "seconds in which a request must be answered, from its place in the queue on (default: no "
        "limit)",
        low=0.01,
        high=30 * 86400.0,
    )
    watchdog_timeout: float = option(
        300.0,
        "seconds without a step, while requests run, until /ready and new requests get 503",
        low=0.1,
        high=86400.0,
    )
    write_timeout: float = option(
        60.0, "seconds a client's socket may take nothing before it is cut", low=1.0, high=86400.0
    )
    reasoning_field: str = option(
        "reasoning_content",
        "what a message's reasoning is called in answers",
        choices=("reasoning_content", "reasoning", "both"),
    )
    disable_page: bool = option(False, "serve no page at /, only the API")
    strict_fields: bool = option(
        False, "refuse unknown request fields instead of ignoring them with a warning"
    )
    forwarded_allow_ips: tuple[str, ...] = option(
        (), "proxies, as addresses or networks, whose X-Forwarded-For the request log believes"
    )
    response_store_bytes: int = option(
        64 << 20,
        "memory for answers of /v1/responses that clients may ask for again; 0 keeps none",
        low=0,
        high=1 << 40,
        suffixes=True,
    )
    response_store_ttl: float = option(
        3600.0, "seconds for which such an answer is kept", low=1.0, high=30 * 86400.0
    )
    enable_log_requests: bool = option(False, "log one line a request (of probes, at level debug)")
    enable_log_request_stats: bool = option(
        False, "log a record of tokens and times for each sample that ends"
    )
    log_stats_interval: int = option(
        10,
        "seconds between lines about the load in the log, while there is any; 0: none",
        low=0,
        high=86400,
    )
    profile_dir: str | None = option(
        None,
        "folder for traces of the engine's steps, which POST /start_profile asks for (default: "
        "none are recorded)",
    )
    metrics_compat: str = option(
        "none",
        "show metrics under these names too, for boards that exist",
        choices=("none", "vllm"),
    )
    log_level: str = option(
        "info", "least severe messages shown", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
            if getattr(self, name) and not self.allowed_origins:
                raise ConfigError(f"{name} needs allowed_origins: no page may call the API else")
        for address in self.forwarded_allow_ips:
            try:
                ipaddress.ip_network(address, strict=False)
            except ValueError:
                raise ConfigError(
                    f"forwarded_allow_ips takes addresses and networks, got {address[:60]!r}"
                ) from None
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"{name} needs ssl_certfile: there is no TLS else")
        if self.ssl_cert_reqs is not None and self.ssl_ca_certs is None:
            raise ConfigError("ssl_cert_reqs needs ssl_ca_certs, by which clients are checked")
