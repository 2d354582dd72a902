"""What the public port proves itself with, and whom it asks to do the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """PEM files on the gateway's machine; read at each start, so that new ones are taken up then.

    ``deploy.tls.check_server_tls`` says beforehand, in words, what is wrong with them.
    """

    cert_file: str
    """The certificate, and behind it those between it and its root, if any."""
    key_file: str
    """Its private key, not encrypted."""
    client_ca_file: str | None = None
    """If named, only clients are heard whose certificate one of these roots has signed."""

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files.

        Raises:
            OSError: one cannot be read.
        """
        pair = (Path(self.key_file).read_bytes(), Path(self.cert_file).read_bytes())
        roots = None if self.client_ca_file is None else Path(self.client_ca_file).read_bytes()
        return grpc.ssl_server_credentials([pair], roots, roots is not None)
