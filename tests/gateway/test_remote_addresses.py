"""Which addresses the gateway may call for a remote environment, and what proves that a server is the one named."""

from __future__ import annotations

import asyncio
import datetime
import ssl

import pytest
from remote_peer import Peer, answers, spec_of

from tide_gateway.runtimes import LaunchFailed, remote_guard
from tide_gateway.runtimes.remote import RemoteRuntime
from tide_sdk.http import ConnectFailed

PRIVATE = "is private, loopback, link-local"


@pytest.fixture
async def peer():
    async with Peer().serve() as running:
        yield running


@pytest.fixture
async def runtime():
    runtime = RemoteRuntime()
    yield runtime
    await runtime.close()


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "017700000001"),
        *("[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "localhost", "LOCALHOST"),
    ],
)
async def test_this_machine_is_refused_in_every_spelling(peer, runtime, host):
    spec = spec_of(f"http://{host}:{peer.port}", allow_private=False)
    with pytest.raises(LaunchFailed, match=f"is refused: .* {PRIVATE}"):
        await runtime.launch("far", 0, spec, 60.0)
    assert peer.connections == 0


@pytest.mark.parametrize(
    "address",
    [
        *(
            "10.0.0.1",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "100.127.255.255",
        ),
        *("192.0.0.8", "198.18.0.1", "fc00::1", "fd12::1", "fe80::1", "fe80::1%eth0", "fec0::1", "64:ff9b::a00:1"),
        *("::ffff:10.0.0.1", "::ffff:8.8.8.8", "2002:a00:1::", "2001:0:a00:1::", "::7f00:1", "2001:db8::1"),
    ],
)
def test_an_address_that_is_not_public_wants_allow_private(address):
    assert PRIVATE in (remote_guard.refusal(address, allow_private=False) or "")
    assert remote_guard.refusal(address, allow_private=True) is None or address == "::7f00:1"


@pytest.mark.parametrize("address", ["0.0.0.0", "0.1.2.3", "224.0.0.1", "255.255.255.255", "240.0.0.1", "::", "ff02::1",
                                     "::ffff:0.0.0.0", "::ffff:224.0.0.1", "name.test", ""])  # fmt: skip
@pytest.mark.parametrize("allow_private", [False, True])
def test_what_is_no_server_is_always_refused(address, allow_private):
    assert remote_guard.refusal(address, allow_private=allow_private) is not None


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111"])
def test_public_addresses_are_allowed(address):
    assert remote_guard.refusal(address, allow_private=False) is None


async def test_a_name_with_one_private_address_is_refused_whole():
    runtime = RemoteRuntime(resolve=answers("93.184.216.34 10.0.0.1"))
    with pytest.raises(LaunchFailed, match=rf"far\.test is refused: its address 10\.0\.0\.1 {PRIVATE}"):
        await runtime.launch("far", 0, spec_of("http://far.test", allow_private=False), 60.0)


async def test_a_name_that_changes_its_mind_is_refused_at_the_next_connection(peer, runtime, monkeypatch):
    """The first answer is public as far as the guard knows; the second is a private one (DNS rebinding)."""
    resolve = answers("127.0.0.1", "10.0.0.1")
    monkeypatch.setattr(remote_guard, "refusal", judged_public("127.0.0.1"))
    runtime = RemoteRuntime(resolve=resolve)
    spec = spec_of(f"http://far.test:{peer.port}", allow_private=False)
    server = await runtime.launch("far", 0, spec, 5.0)
    assert (peer.connections, f"Host: far.test:{peer.port}\r\n" in peer.heads[0]) == (1, True)
    both = [server.channel.request("GET", "/health", timeout_s=5.0) for _ in range(2)]
    kept, renewed = await asyncio.gather(*both, return_exceptions=True)  # one connection is kept, one is new
    assert kept.status == 200
    assert isinstance(renewed, ConnectFailed)
    assert "10.0.0.1" in str(renewed)
    await runtime.close()


def judged_public(address: str):
    real = remote_guard.refusal
    return lambda found, *, allow_private: None if found == address else real(found, allow_private=allow_private)


@pytest.mark.parametrize("host", ["localhost.localdomain", "localhost.", "metadata.test.", "a.nip.test"])
async def test_a_name_is_judged_by_where_it_leads(peer, host):
    runtime = RemoteRuntime(resolve=answers("127.0.0.1"))
    with pytest.raises(LaunchFailed, match=f"is refused: .* {PRIVATE}"):
        await runtime.launch("far", 0, spec_of(f"http://{host}:{peer.port}", allow_private=False), 60.0)
    assert peer.connections == 0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """`authority(name)` makes a CA; what it gives makes a server's context and the path of the CA's certificate."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("certificates")
    pem = serialization.Encoding.PEM

    def sign(name, key, issuer, issuer_key, is_ca):
        subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(issuer or subject, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
            now + datetime.timedelta(1)
        )
        builder = builder.add_extension(x509.BasicConstraints(is_ca, None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        return builder.sign(issuer_key or key, hashes.SHA256())

    def authority(ca_name):
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca = sign(ca_name, ca_key, None, None, True)
        ca_path = folder / f"{ca_name}.pem"
        ca_path.write_bytes(ca.public_bytes(pem))

        def server(name):
            key = ec.generate_private_key(ec.SECP256R1())
            path = folder / f"{ca_name}-{name}.pem"
            private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            path.write_bytes(private + sign(name, key, ca.subject, ca_key, False).public_bytes(pem))
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(path)
            return context

        return server, str(ca_path)

    return authority


async def test_the_certificate_is_checked_against_the_name_and_the_authority(certificates):
    good, ca_file = certificates("good")
    stranger, _ = certificates("stranger")
    runtime = RemoteRuntime(resolve=answers("127.0.0.1"))

    async def launch(tls, **options):
        async with Peer().serve(tls) as peer:
            server = await runtime.launch("far", 0, spec_of(f"https://far.test:{peer.port}/x", **options), 20.0)
            answer = await server.channel.request("GET", "/health")
            await runtime.close()
            return answer.status, peer.heads[0]

    status, head = await launch(good("far.test"), ca_file=ca_file)
    assert (status, head.startswith("GET /x/health "), "Host: far.test:" in head) == (200, True, True)
    for tls, options in [
        (good("other.test"), {"ca_file": ca_file}),
        (stranger("far.test"), {"ca_file": ca_file}),
        (good("far.test"), {}),
    ]:
        with pytest.raises(LaunchFailed, match=r"the certificate of far\.test is refused"):
            await launch(tls, **options)
    with pytest.raises(LaunchFailed, match=r"remote\.ca_file: cannot use /not/there"):
        await launch(good("far.test"), ca_file="/not/there")
    with pytest.raises(LaunchFailed, match=r"not healthy within 0\.5 s"):  # a server without TLS
        async with Peer().serve() as peer:
            await runtime.launch("far", 0, spec_of(f"https://far.test:{peer.port}"), 0.5)
