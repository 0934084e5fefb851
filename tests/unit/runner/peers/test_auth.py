"""Who may speak, and that nothing on the way can be changed: without sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.host.own_files import private_mode
from checkpointing.storage import open_storage
from runner.errors import UsageError
from runner.peers.auth import (
    MAX_HANDSHAKE_BYTES,
    RECORD_NAME,
    VARIABLE,
    PeerAuth,
    WrongSecret,
    _hash,
    ensure_secret,
    read_secret,
)

SECRET = b"0123456789abcdef" * 4
NUMBER = b"ab" * 32


def connected(leaders: bytes = SECRET, members: bytes = SECRET) -> tuple[PeerAuth, PeerAuth]:
    leader, member = PeerAuth(leaders, "leader"), PeerAuth(members, "member")
    assert member.opening() == b""
    lines = [leader.opening()]
    for side in (member, leader, member):
        assert lines[-1].endswith(b"\n") and len(lines[-1]) <= MAX_HANDSHAKE_BYTES
        lines.append(side.answer(lines[-1][:-1]))
    assert lines[-1] == b""
    return leader, member


def test_two_that_know_the_secret_exchange_lines() -> None:
    leader, member = connected()
    assert leader.done and member.done
    for line in (b"one", b"two", b"", b"with spaces \xff"):
        assert leader.open(member.seal(line)) == line
        assert member.open(leader.seal(line)) == line


def test_a_node_with_another_secret_is_found_by_the_leader() -> None:
    with pytest.raises(WrongSecret):
        connected(members=SECRET + b"0")


def test_a_leader_with_another_secret_is_found_by_the_node() -> None:
    member, false_leader = PeerAuth(SECRET, "member"), PeerAuth(b"guess", "leader")
    proof = member.answer(false_leader.opening()[:-1]).split()
    forged = b"proof " + _hash(b"guess", b"proof", b"leader", b" ".join(proof[:2]))
    with pytest.raises(WrongSecret):
        member.answer(forged)
    assert not member.done


def test_a_proof_sent_back_proves_nothing() -> None:
    """The leader's code and the member's differ, so that neither side can be made to compute the other's."""
    leader, member = PeerAuth(SECRET, "leader"), PeerAuth(SECRET, "member")
    _, _, code = member.answer(leader.opening()[:-1]).split()
    with pytest.raises(WrongSecret):
        member.answer(b"proof " + code)
    # Nor a leader's number as one's own.
    with pytest.raises(WrongSecret):
        leader.answer(b"proof " + leader.opening().split()[1] + b" " + code)


def test_what_was_recorded_is_of_no_use_on_another_connection() -> None:
    leader, member = PeerAuth(SECRET, "leader"), PeerAuth(SECRET, "member")
    proof = member.answer(leader.opening()[:-1])[:-1]
    leader.answer(proof)
    with pytest.raises(WrongSecret):
        PeerAuth(SECRET, "leader").answer(proof)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1\r",
        b"challenge",
        b"challenge " + NUMBER,
        b"proof",
        b"proof " + NUMBER,
        b"proof " + NUMBER + b" xy",
        b"proof " + NUMBER.upper() + b" " + NUMBER,
        b"proof " + NUMBER + b" " + NUMBER + b" " + NUMBER,
        b'{"do": "hello", "node_rank": 1}',
    ],
)
def test_a_leader_takes_nothing_but_a_proof(line: bytes) -> None:
    leader = PeerAuth(SECRET, "leader")
    with pytest.raises(ValueError, match="handshake"):
        leader.answer(line)
    assert not leader.done


def test_a_node_takes_no_proof_before_a_challenge_and_no_second_challenge() -> None:
    member = PeerAuth(SECRET, "member")
    with pytest.raises(ValueError, match="handshake"):
        member.answer(b"proof " + NUMBER)
    member.answer(b"challenge " + NUMBER)
    with pytest.raises(ValueError, match="handshake"):
        member.answer(b"challenge " + NUMBER)


def test_a_line_is_taken_once_in_its_order_and_in_its_direction() -> None:
    leader, member = connected()
    first, second = member.seal(b"first"), member.seal(b"second")
    with pytest.raises(ValueError, match="wrong code"):
        leader.open(second)
    with pytest.raises(ValueError, match="wrong code"):
        member.open(first)
    assert leader.open(first) == b"first"
    with pytest.raises(ValueError, match="wrong code"):
        leader.open(first)
    assert leader.open(second) == b"second"


@given(st.binary(max_size=40), st.integers(min_value=0), st.integers(1, 255))
def test_no_byte_can_be_changed(line: bytes, position: int, change: int) -> None:
    leader, member = connected()
    sealed = bytearray(member.seal(line))
    sealed[position % len(sealed)] ^= change
    with pytest.raises(ValueError, match="wrong code"):
        leader.open(bytes(sealed))


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_the_first_node_writes_it_and_the_others_read_it(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "volume"))
    assert read_secret(storage) is None
    secret = ensure_secret(storage)
    assert len(secret) == 64
    assert (tmp_path / "volume" / ".records" / RECORD_NAME).stat().st_mode & 0o777 == private_mode()
    assert ensure_secret(storage) == read_secret(open_storage(str(tmp_path / "volume"))) == secret
    assert ensure_secret(open_storage(str(tmp_path / "other"))) != secret


@pytest.mark.parametrize("damaged", [b"", b"\n", b"short", b"g" * 64, b"a" * 65])
def test_a_damaged_one_is_replaced(damaged: bytes, tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.sidecars.write(RECORD_NAME, damaged)
    assert read_secret(storage) is None
    assert read_secret(storage) != ensure_secret(storage) == read_secret(storage)


def test_the_environments_comes_first_and_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path))
    monkeypatch.setenv(VARIABLE, " correct horse battery staple\n")
    assert ensure_secret(storage) == read_secret(storage) == b"correct horse battery staple"
    assert storage.sidecars.sizes() == {}


def test_a_short_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "hunter2")
    for function in (read_secret, ensure_secret):
        with pytest.raises(UsageError, match="RUNNER_SECRET has 7 characters; use 16 or more") as caught:
            function(open_storage(str(tmp_path)))
        assert "hunter2" not in str(caught.value)
