"""A certificate of this machine, as tests of TLS need one."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def make_certificate(folder: Path) -> None:
    """Write cert.pem, key.pem, other.pem (another key) and locked.pem (the key with a passphrase)."""
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = x509.CertificateBuilder(name, name, keys[0].public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    signed = builder.add_extension(x509.SubjectAlternativeName(names), False).sign(keys[0], hashes.SHA256())
    pem, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "cert.pem").write_bytes(signed.public_bytes(pem))
    for file, key, lock in (
        ("key.pem", keys[0], serialization.NoEncryption()),
        ("other.pem", keys[1], serialization.NoEncryption()),
        ("locked.pem", keys[0], serialization.BestAvailableEncryption(b"x")),
    ):
        (folder / file).write_bytes(key.private_bytes(pem, kind, lock))
