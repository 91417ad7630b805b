"""Authorities and certificates for tests, of the kinds that operators have."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

FIRST_DAY = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
LAST_DAY = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates for 127.0.0.1. `pem` is its own."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(self._name, self._name, self._key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        certificate = builder.sign(self._key, hashes.SHA256())
        self.pem = directory / f"{name}.pem"
        self.pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        alternative = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        builder = _builder(_name(name), self._name, key).add_extension(alternative, critical=False)
        pair = Pair(self._directory / f"{name}.crt", self._directory / f"{name}.key")
        pair.cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(FIRST_DAY).not_valid_after(LAST_DAY)
