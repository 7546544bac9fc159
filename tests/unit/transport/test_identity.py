"""Keys and certificates: signing requests, contents and file permissions."""

from __future__ import annotations

import hashlib
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ravnest.errors import IdentityError
from ravnest.transport.identity import (
    Authority,
    Identity,
    fingerprint,
    make_authority,
    make_key,
    make_request,
    save_identity,
)
from ravnest.transport.tls import tls_context
from tests.unit.transport.kinds import YEAR, Members

NOW = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority("a run", now=NOW, valid=YEAR)


def test_a_certificate_has_the_name_given_by_the_authority(authority: Authority) -> None:
    key = make_key()
    signed = authority.sign(make_request(key, "i-would-like"), "you-get", now=NOW, valid=YEAR)
    certificate = x509.load_pem_x509_certificate(signed)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert certificate.public_key() == key.public_key()
    assert certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "you-get"
    assert names.get_values_for_type(x509.DNSName) == ["you-get"]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["ravnest:you-get"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    certificate.verify_directly_issued_by(authority.certificate)


def test_clocks_may_differ_by_a_day(authority: Authority) -> None:
    signed = authority.sign(make_request(make_key(), "node-a"), "node-a", now=NOW, valid=YEAR)
    for certificate in (authority.certificate, x509.load_pem_x509_certificate(signed)):
        assert certificate.not_valid_before_utc == NOW - timedelta(days=2)
        assert certificate.not_valid_after_utc == NOW + YEAR


def test_the_fingerprint_is_the_hash_of_the_der_bytes(authority: Authority) -> None:
    binary = ssl.PEM_cert_to_DER_cert(authority.certificate_pem.decode())
    assert fingerprint(authority.certificate_pem) == hashlib.sha256(binary).hexdigest()
    with pytest.raises(IdentityError, match="not a certificate"):
        fingerprint(b"nonsense")


def test_save_and_load(authority: Authority, tmp_path: Path) -> None:
    authority.save(tmp_path / "authority")
    again = Authority.load(tmp_path / "authority")
    assert again.certificate == authority.certificate
    key = make_key()
    signed = again.sign(make_request(key, "node-a"), "node-a", now=NOW, valid=YEAR)
    saved = save_identity(tmp_path / "node", key, signed, again.certificate_pem)
    assert saved == Identity.load(tmp_path / "node")
    assert saved.name == "node-a"
    assert stat.S_IMODE((tmp_path / "node").stat().st_mode) == 0o700
    for written in (tmp_path / "authority" / "key.pem", saved.key_path):
        assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert not list(tmp_path.rglob("*.partial"))


def test_a_key_that_others_can_read_is_rejected(members: Members) -> None:
    identity = members.make("careless")
    identity.key_path.chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load(identity.directory)


def test_files_that_do_not_match_are_rejected(members: Members) -> None:
    identity = members.make("mixed")
    identity.key_path.write_bytes(members["left"].key_path.read_bytes())
    with pytest.raises(IdentityError, match="does not match"):
        Identity.load(identity.directory)
    with pytest.raises(IdentityError, match="cannot be used"):
        tls_context(identity, server_side=True)
    identity.key_path.write_bytes(b"nonsense")
    with pytest.raises(IdentityError, match="not a key"):
        Identity.load(identity.directory)
    identity.key_path.unlink()
    with pytest.raises(IdentityError, match="cannot read"):
        Identity.load(identity.directory)


def request_with(key: ec.EllipticCurvePrivateKey) -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node-a")])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def forged_request() -> bytes:
    """A valid request with the last byte of its signature changed."""
    der = bytearray(x509.load_pem_x509_csr(make_request(make_key(), "node-a")).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    return x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    ("request_pem", "message"),
    [
        pytest.param(b"nonsense", "not a signing request", id="nonsense"),
        pytest.param(b"x" * 20_000, "over", id="too long"),
        pytest.param(request_with(ec.generate_private_key(ec.SECP384R1())), "P-256", id="another curve"),
        pytest.param(forged_request(), "not signed with its own key", id="forged"),
    ],
)
def test_bad_requests_are_rejected(authority: Authority, request_pem: bytes, message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        authority.sign(request_pem, "node-a", now=NOW, valid=YEAR)


def test_names_are_ids(authority: Authority) -> None:
    with pytest.raises(ValueError, match="valid name"):
        make_request(make_key(), "Not A Name")
    with pytest.raises(ValueError, match="valid name"):
        authority.sign(make_request(make_key(), "node-a"), "*.everybody", now=NOW, valid=YEAR)
