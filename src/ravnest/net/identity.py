"""Who a node is: a key that never leaves it, and a certificate in which the run's authority names it.

The authority is a self-signed certificate made for one run. A node makes a key, sends a signing request,
and gets back a certificate with the name *the authority* gives it (what the request says is not trusted).
Home PCs have clocks that are wrong, so certificates are valid from two days before they are made.
Keys are ECDSA on P-256: every TLS library has it, and signing takes microseconds.
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

from ravnest.core.errors import IdentityError
from ravnest.core.ids import check_id

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
    """Three files in one directory: the node's key, its certificate, and the authority's certificate."""

    directory: Path
    name: str

    @classmethod
    def load(cls, directory: Path) -> Identity:
        certificate = _read_certificate(directory / _CERTIFICATE)
        key = _read_key(directory / _KEY)
        if certificate.public_key() != key.public_key():
            raise IdentityError(f"the key in {directory} does not belong to the certificate next to it")
        return cls(directory, _common_name(certificate))

    def valid_until(self) -> datetime:
        return _read_certificate(self.certificate_path).not_valid_after_utc

    def is_of(self, authority_pem: bytes) -> bool:
        """Whether this authority gave the certificate."""
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
    """The run's own authority: whoever it has signed belongs to the run."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def sign(self, request_pem: bytes, name: str, *, now: datetime, valid: timedelta) -> bytes:
        """A certificate (PEM) that names the holder of the request's key `name`."""
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
    """A new authority, trusted by nobody yet; its `fingerprint` is what a ticket carries."""
    key = make_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, subject, key.public_key(), now, valid)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return Authority(key, builder.sign(key, hashes.SHA256()))


def make_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def make_request(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """A signing request (PEM): proves that the sender holds `key`, and asks for `name`."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, check_id(name))])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def save_identity(
    directory: Path, key: ec.EllipticCurvePrivateKey, certificate_pem: bytes, authority_pem: bytes
) -> Identity:
    """Write a node's identity to `directory`, the key readable by this user only."""
    _write(directory / _KEY, _key_pem(key))
    _write(directory / _CERTIFICATE, certificate_pem)
    _write(directory / _AUTHORITY, authority_pem)
    return Identity.load(directory)


def fingerprint(certificate_pem: bytes) -> str:
    """The SHA-256 of a certificate, in hexadecimal."""
    return _parse_certificate(certificate_pem, "the certificate").fingerprint(hashes.SHA256()).hex()


def key_digest(request_pem: bytes) -> str:
    """The SHA-256 of the key that a signing request is for, in hexadecimal; raises `IdentityError`."""
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
    """The request's key, if whoever made the request holds it."""
    if len(request_pem) > _MAX_REQUEST_BYTES:
        raise IdentityError(f"a signing request of {len(request_pem)} bytes is over {_MAX_REQUEST_BYTES}")
    try:
        request = x509.load_pem_x509_csr(request_pem)
        key = request.public_key()
        is_proven = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise IdentityError(f"this is not a signing request: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError("the signing request has another kind of key than ECDSA on P-256")
    if not is_proven:
        raise IdentityError("the signing request is not signed with its own key")
    return key


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1:
        raise IdentityError("the certificate does not name exactly one node")
    return str(names[0].value)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    data = _read(path)
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise IdentityError(f"others may read the key {path}: give it to this user alone (chmod 600)")
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
    """Whole or not at all, and never readable by others, not even for a moment."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
