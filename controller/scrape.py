"""Where ``/metrics`` is served; who serves it is in ``scrape_server``, which imports aiohttp."""

from __future__ import annotations

import ssl
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeSettings:
    """Where ``/metrics`` is served; picklable. The files are PEM, on the controller's machine.

    Raises:
        ValueError: one of certificate and key without the other, or client roots without both.
    """

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one; a restarted controller has the same one only if it is named here."""
    cert_file: str | None = None
    """If named, scrapers must speak TLS."""
    key_file: str | None = None
    client_ca_file: str | None = None
    """If named, only scrapers are heard whose certificate one of these roots has signed."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file: one is named without the other")
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("client_ca_file has no meaning without cert_file and key_file")

    def tls(self) -> ssl.SSLContext | None:
        """Read the files.

        Raises:
            OSError: one cannot be read, or is none of its kind.
        """
        if self.cert_file is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.client_ca_file)
        # No password: OpenSSL would ask for one at the terminal.
        context.load_cert_chain(self.cert_file, self.key_file, password="")
        if self.client_ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context
