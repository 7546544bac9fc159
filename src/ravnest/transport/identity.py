"""Node identities: a private key that never leaves the node, and a certificate of the run's authority with its name.

The authority is a self-signed certificate made for one run. A node makes a key, sends a signing request,
and receives a certificate with the name that *the authority* chose (the name in the request is not trusted).
Clocks of home PCs may be wrong, so certificates are valid from two days before they are made.
Keys are ECDSA on P-256: every TLS library supports it, and signing takes microseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import stat
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ravnest.core.ids import check_id
from ravnest.errors import IdentityError

__all__ = [
    "Authority",
    "Identity",
    "fingerprint",
    "key_digest",
    "make_authority",
    "make_key",
    "make_request",
    "save_identity",
]

_CLOCK_TOLERANCE = timedelta(days=2)
_MAX_REQUEST_BYTES = 16 * 1024
_KEY, _CERTIFICATE, _AUTHORITY = "key.pem", "certificate.pem", "authority.pem"


@dataclasses.dataclass(frozen=True)
class Identity:
    """A directory with three files: the node's key, its certificate, and the authority's certificate."""

    directory: Path
    name: str

    @classmethod
    def load(cls, directory: Path) -> Identity:
        certificate = _read_certificate(directory / _CERTIFICATE)
        key = _read_key(directory / _KEY)
        if certificate.public_key() != key.public_key():
            raise IdentityError(f"the key in {directory} does not match the certificate there")
        return cls(directory, _common_name(certificate))

    def valid_until(self) -> datetime:
        return _read_certificate(self.certificate_path).not_valid_after_utc

    def is_of(self, authority_pem: bytes) -> bool:
        """Whether this authority issued the certificate."""
        return _read(self.authority_path) == authority_pem

    @property
    def key_path(self) -> Path:
        return self.directory / _KEY

    @property
    def certificate_path(self) -> Path:
        return self.directory / _CERTIFICATE

    @property
    def authority_path(self) -> Path:
        return self.directory / _AUTHORITY


@dataclasses.dataclass(frozen=True)
class Authority:
    """Certificate authority of one run: its certificates prove membership."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def sign(self, request_pem: bytes, name: str, *, now: datetime, valid: timedelta) -> bytes:
        """Issue a certificate (PEM) with the name `name` for the key of the request."""
        public_key = _check_request(request_pem)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_id(name))])
        builder = _builder(subject, self.certificate.subject, public_key, now, valid)
        for extension, critical in _node_extensions(name, self.certificate):
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def save(self, directory: Path) -> None:
        _write(directory / _KEY, _key_pem(self.key))
        _write(directory / _AUTHORITY, self.certificate_pem)

    @classmethod
    def load(cls, directory: Path) -> Authority:
        return cls(_read_key(directory / _KEY), _read_certificate(directory / _AUTHORITY))


def make_authority(name: str, *, now: datetime, valid: timedelta) -> Authority:
    """Create an authority; a ticket carries its `fingerprint`."""
    key = make_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, subject, key.public_key(), now, valid)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return Authority(key, builder.sign(key, hashes.SHA256()))


def make_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def make_request(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """Create a signing request (PEM), which proves possession of `key` and requests `name`."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_id(name))])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def save_identity(
    directory: Path, key: ec.EllipticCurvePrivateKey, certificate_pem: bytes, authority_pem: bytes
) -> Identity:
    """Write a node's identity to `directory`, with the key readable by this user only."""
    _write(directory / _KEY, _key_pem(key))
    _write(directory / _CERTIFICATE, certificate_pem)
    _write(directory / _AUTHORITY, authority_pem)
    return Identity.load(directory)


def fingerprint(certificate_pem: bytes) -> str:
    """SHA-256 of a certificate, in hexadecimal."""
    return _parse_certificate(certificate_pem, "input").fingerprint(hashes.SHA256()).hex()


def key_digest(request_pem: bytes) -> str:
    """SHA-256 of the key of a signing request, in hexadecimal; raises `IdentityError`."""
    key = _check_request(request_pem)
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(*form)).hexdigest()


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, valid: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_TOLERANCE)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _node_extensions(name: str, authority: x509.Certificate) -> list[tuple[x509.ExtensionType, bool]]:
    issuer = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage(uses), False),
        (
            x509.SubjectAlternativeName([x509.DNSName(name), x509.UniformResourceIdentifier(f"ravnest:{name}")]),
            False,
        ),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), False),
    ]


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _check_request(request_pem: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key of a request after checking that the request is signed with it."""
    if len(request_pem) > _MAX_REQUEST_BYTES:
        raise IdentityError(f"signing request of {len(request_pem)} bytes is over the limit of {_MAX_REQUEST_BYTES}")
    try:
        request = x509.load_pem_x509_csr(request_pem)
        key = request.public_key()
        is_signed = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise IdentityError(f"not a signing request: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError("the key of the signing request must be ECDSA on P-256")
    if not is_signed:
        raise IdentityError("the signing request is not signed with its own key")
    return key


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1:
        raise IdentityError(f"certificate must have exactly one common name, got {len(names)}")
    return str(names[0].value)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    data = _read(path)
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise IdentityError(f"key file {path} is accessible to other users: restrict it (chmod 600)")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise IdentityError(f"{path} is not a key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise IdentityError(f"{path} is not an ECDSA key")
    return key


def _read_certificate(path: Path) -> x509.Certificate:
    return _parse_certificate(_read(path), str(path))


def _parse_certificate(data: bytes, what: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError as error:
        raise IdentityError(f"{what} is not a certificate: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise IdentityError(f"cannot read {path}: {error}") from error


def _write(path: Path, data: bytes) -> None:
    """Write atomically, and never readable by other users."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
