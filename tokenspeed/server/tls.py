"""TLS of the HTTP side: the certificate, and what is asked of clients."""

from __future__ import annotations

import ssl

from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.server_config import ServerConfig

PROTOCOLS = ("h2", "http/1.1")
CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Those that HTTP/2 allows in TLS 1.2."""


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """What connections are wrapped in; None without a certificate. Raises ConfigError for files
    that cannot be used.
    """
    if server.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(PROTOCOLS)
    _load(context, server)
    if server.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(server.ssl_ca_certs)
        except OSError as error:  # an SSLError is one
            raise ConfigError(f"--ssl-ca-certs cannot be used: {_reason(error)}") from None
        asked = server.ssl_cert_reqs
        context.verify_mode = ssl.CERT_REQUIRED if asked is None else ssl.VerifyMode(asked)
    return context


def renew_certificate(context: ssl.SSLContext, server: ServerConfig) -> None:
    """Read the files again, for connections from now on. Bad ones are logged and change nothing."""
    try:
        tls_context(server)  # tried apart: a context is left broken by files that do not match
        _load(context, server)
        logger.info("read the TLS certificate again")
    except ConfigError as error:
        logger.error("the TLS certificate stays as it is: %s", error)


def _load(context: ssl.SSLContext, server: ServerConfig) -> None:
    assert server.ssl_certfile is not None
    # Without a password OpenSSL would ask for one on the terminal.
    password = server.ssl_keyfile_password or ""
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, lambda: password)
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile and --ssl-keyfile cannot be used: {_reason(error)}"
        ) from None


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = error.reason and error.reason.replace("_", " ").lower()
        return reason or "no PEM file, or a wrong password"
    return error.strerror or "it cannot be read"
