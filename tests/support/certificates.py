"""Certificates for TLS tests, made on the spot: a root, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path


class Authority:
    """A root whose files lie in a folder."""

    def __init__(self, folder: Path, name: str = "root") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._cert = self._sign(name, self._key, ca=True, hosts=(), days=(-1.0, 30.0))
        self.root = folder / f"{name}.pem"
        self.root.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        hosts: Sequence[str] = ("127.0.0.1", "localhost"),
        *,
        days: tuple[float, float] = (-1.0, 30.0),
        password: bytes | None = None,
    ) -> Pair:
        """Sign a certificate for ``hosts``, valid between two times from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self._sign(name, key, ca=False, hosts=hosts, days=days)
        pair = Pair(cert=self._folder / f"{name}.pem", key=self._folder / f"{name}.key")
        pair.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            encryption = serialization.BestAvailableEncryption(password)
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
            )
        )
        return pair

    def _sign(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        *,
        ca: bool,
        hosts: Sequence[str],
        days: tuple[float, float],
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject if ca else self._cert.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + days[0] * DAY)
            .not_valid_after(now + days[1] * DAY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
